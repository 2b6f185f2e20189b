"""The `localstack` profile on this machine: AWS's APIs from emulators, hosts as containers, all on loopback.

`python -m scripts.localstack run` starts it, plays the demo and takes it down; docs/localstack.md.
"""
