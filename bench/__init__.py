"""Speed beside its floors: `python -m bench` prints a table and writes bench/results.json. Never run by the tests."""
