from scripts.localstack.cli import main

raise SystemExit(main())
