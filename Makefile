# Every target says what it does: `make help`. Everything heavy is cached below ~/.cache/gpushare (GPUSHARE_CACHE).
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help
help: ## Show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "CLUSTER=local|kind|existing picks the cluster (default: what this machine has)."

.PHONY: venv
venv: ## Make .venv with gpushare and every development tool (instant when it is there)
	@hack/venv

.PHONY: check check-static check-unit
check: venv ## Formatting, lint, types, layers and unit tests, side by side: four minutes on 2 cores
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-static check-unit

check-static: venv
	ruff format --check .
	ruff check .
	mypy
	MYPYPATH=hack:src mypy --strict --explicit-package-bases -p devcluster -p bench.chaos -p story
	lint-imports

check-unit: venv
	pytest -q --numprocesses auto --dist worksteal \
		-m "not integration and not e2e and not gpu and not slow" $(PYTEST_ARGS)

.PHONY: test
test: venv ## Every test this machine can run, integration and e2e on a cluster that it brings up included
	@hack/test $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: venv ## The tests that need an NVIDIA GPU; CLUSTER=existing: installs the chart, faults and restarts MPS there (YES=1: also where in use)
ifeq ($(CLUSTER),existing)
	hack/gpu/cluster $(if $(filter 1,$(YES)),--yes) up install test run -- \
		python3 tests/gpu/chart_suite.py --skip uninstalled --out dist $(if $(filter 1,$(YES)),--yes)
else
	pytest -m gpu $(PYTEST_ARGS)
endif

.PHONY: gpu-bundle
gpu-bundle: venv ## What a whole cluster on a GPU machine without network needs: OUT=DIR, in two parts
	@hack/gpu/bundle $(or $(OUT),dist/gpu)

.PHONY: bench
bench: venv ## The extender's latency at 5,000 nodes, and pods per second through the real kube-scheduler
	@hack/cluster tools
	$(BIN)/python -m bench latency
	$(BIN)/python -m bench throughput

.PHONY: hostile
hostile: venv ## Every threat, 1,000 faults, a soak and an upgrade, one after the other, resumable: some hours, as root
	hack/hostile

.PHONY: docs-check
docs-check: venv ## Run every cheap command that a document quotes figures of; fail where a figure is gone
	python hack/docs_check.py

.PHONY: site
site: venv ## Build the documentation's site into dist/site, strictly: no warning, no dead link
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

.PHONY: demo
demo: venv ## A local cluster with two simulated GPUs, gpushare, and a live table of pods that come and are dealt with
	@hack/cluster demo

.PHONY: demo-record
demo-record: venv ## The same, and what the site shows: its recording and picture, and the report's pictures
	@hack/cluster demo-record docs/guide/demo.cast
	@$(MAKE) --no-print-directory report-pictures

.PHONY: report-pictures
report-pictures: venv ## Only the pictures of the report, of a simulation
	@PYTHONPATH=hack .venv/bin/python hack/report_pictures.py

.PHONY: demo-down
demo-down: ## Remove every trace of the demo
	@hack/cluster demo-down

.PHONY: cluster-up
cluster-up: venv ## Only the cluster
	@hack/cluster up

.PHONY: cluster-down
cluster-down: ## Remove the cluster
	@hack/cluster down

.PHONY: image
image: venv ## Build the image, print its name
	@hack/cluster image

.PHONY: proto
proto: venv ## Generate the gRPC stubs of kubelet's device plugin and PodResources APIs
	python -m grpc_tools.protoc -I deviceplugin --python_out=deviceplugin --pyi_out=deviceplugin \
		--grpc_python_out=deviceplugin gpushare_deviceplugin/api.proto gpushare_deviceplugin/podresources.proto

.PHONY: crds
crds: venv ## Generate crds/ from the core types, and the pages of reference from them and the chart
	python hack/generate_crds.py
	python hack/generate_crds_doc.py
	python hack/generate_names_doc.py
	python hack/generate_cli_doc.py
	python hack/generate_values_doc.py

.PHONY: format
format: venv ## Format the code and mend what the linter can mend
	ruff format .
	ruff check --fix .
