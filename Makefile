# `make setup`, `make demo`, `make test` are all a newcomer needs; `make help` lists the rest.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
PACKAGES := shoal provisioner api runtime_image costs
CODE := $(PACKAGES) tests bench examples scripts

.PHONY: help setup setup-aws demo test test-fast check format lint types imports unit openapi infra bench lock bundle wheel clean \
	image localstack localstack-short localstack-up localstack-down

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install system packages, a virtual environment, the guest runtime and the `code` image (root)
	./scripts/setup

setup-aws: | $(PY) ## add what AWS without AWS needs: emulators, checkov, Debian's docker.io (root)
	./scripts/emulators ministack moto checkov
	command -v dockerd >/dev/null || (apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends docker.io)

$(PY):
	@echo "There is no $(VENV) yet; run as root: make setup" >&2; exit 1

demo: | $(PY) ## a rollout group of 32 scripted agents on a real library, in its own temporary home (root)
	$(PY) examples/demo.py

test: | $(PY) ## every test: unit, contract, real sandboxes, end to end, leaks, crashes (root)
	$(PY) -m pytest -q

test-fast: | $(PY) ## what needs neither root nor runc
	$(PY) -m pytest -q -m "not root" tests/unit tests/contract tests/architecture

check: format lint types imports unit openapi ## format, lint, types, import contracts, fast tests, OpenAPI drift

format:
	$(VENV)/bin/ruff format --check $(CODE)

lint:
	$(VENV)/bin/ruff check $(CODE)

types:
	$(VENV)/bin/mypy

imports:
	$(VENV)/bin/lint-imports

unit: test-fast

openapi: ## fail when a page of docs/ is not what the code says
	$(PY) -m api.openapi --check
	$(PY) scripts/docs.py --check

infra: | $(PY) ## Terraform: format, tests with a mocked provider, policies, cost at rest; without AWS (docs/infra.md)
	$(PY) -m scripts.infra_check

bench: ## speed beside its floors; writes bench/results.json (root)
	$(PY) -m bench

lock: ## write the hash-pinned requirement files anew
	./scripts/lock

bundle: | $(PY) ## the zip files of the Lambda functions, for both architectures, in dist/
	$(PY) scripts/bundle.py

image: | $(PY) ## the agent's container image, in the Docker daemon that DOCKER_HOST names
	./scripts/agent_image

localstack: | $(PY) ## the AWS profile on emulators: Terraform, Lambda, ECS, real sandboxes; a demo; nothing left (root)
	$(PY) -m scripts.localstack run

localstack-short: | $(PY) ## the same, smaller: what CI runs (root)
	$(PY) -m scripts.localstack run --short

localstack-up: | $(PY) ## only start it, and say how to use it (root)
	$(PY) -m scripts.localstack up

localstack-down: | $(PY) ## end what localstack-up started (root)
	$(PY) -m scripts.localstack down

wheel: ## the wheel that trainers install: `shoal` alone
	$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .

clean: ## remove what builds and tests left in this folder
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
