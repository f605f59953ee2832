# GNU make. `make` lists the targets.

GO                ?= go
GOLANGCI_VERSION   = v2.15.0
GOLANGCI           = bin/golangci-lint-$(GOLANGCI_VERSION)
FUZZTIME          ?= 10s
# The seed of the pairs of features. A failure prints it.
PAIRSEED          ?= 1
# -count=1 because it tests the last commit, which Go does not see change.
BUILD              = $(GO) test -tags build -count=1 -timeout 30m -v ./e2e/build
# How many interleavings of the ledger make soak goes through: about ten minutes' worth.
SOAK              ?= 1000000

.DEFAULT_GOAL := help
.PHONY: help build run test check contrib model soak lint bench bench-quick algorithms calls faults guarantees scaling packages fmt demo

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

# With a version, which is any, xcaddy asks nobody for the versions of the module.
build: ## build Caddy with this checkout, into ./caddy
	$(GO) tool xcaddy build --with github.com/shardlimit/caddy-shardlimit@v0.0.0=. --output caddy

run: ## run Caddy with Caddyfile.example
	$(GO) run ./cmd/caddy run --config Caddyfile.example

# Three packages of the laboratory run at once, because they wait most of the time.
# internal/redistest sets how many tests of a package run in parallel.
test: ## install what the tests need, and run them
	scripts/install-needed.sh redis-server nginx chromium wrk
	@echo "Running the tests; the first time, Go builds Caddy and its libraries, which takes a few minutes."
	$(GO) test -shuffle=on -timeout 20m ./...
	cd lab && $(GO) test -p 3 -shuffle=on -timeout 20m ./...

check: ## run all tests with the race detector, those of the laboratory too, all pairs of features, each fuzz target for FUZZTIME, the build of contrib, and the model of charges
	scripts/install-needed.sh
	CGO_ENABLED=1 $(GO) test -race -shuffle=on -timeout 40m ./...
	cd lab && CGO_ENABLED=1 $(GO) test -race -shuffle=on -timeout 40m ./...
	$(GO) test -run 'TestPairs$$|TestDeadShard' -timeout 30m ./e2e -pairs.all -pairs.seed $(PAIRSEED) -dead.duration 6s
	FUZZTIME=$(FUZZTIME) scripts/fuzz.sh
	$(BUILD)
	scripts/model.sh

contrib: ## build the last commit by the README's command, with the newest and the oldest Caddy and Go, and run what that builds
	$(BUILD)

model: ## check the protocol of charges between processes with Spin
	scripts/install-needed.sh spin cc
	scripts/model.sh

soak: ## ten minutes of faults under load, then the ledger's model in many more interleavings
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . soak
	$(GO) test -run TestModel -timeout 3h ./store/ledger -ledger.seeds $(SOAK) -ledger.seed $$(date +%s)

# golangci-lint does what go vet does, for the system that it runs on.
lint: $(GOLANGCI) ## check format, go vet (for Linux, macOS and Windows), golangci-lint, go.mod and the modules
	@files=$$(gofmt -l .) || exit 1; \
	if [ -n "$$files" ]; then echo "not formatted (see make fmt):"; echo "$$files"; exit 1; fi
	@for os in linux darwin windows; do \
		[ $$os != "$$($(GO) env GOOS)" ] || continue; \
		for dir in . lab; do \
			echo "GOOS=$$os go vet ./... in $$dir"; \
			(cd $$dir && GOOS=$$os CGO_ENABLED=0 $(GO) vet ./...) || exit 1; \
		done; \
	done
	$(GOLANGCI) run ./...
	$(GO) mod tidy -diff
	$(GO) mod verify
	cd lab && ../$(GOLANGCI) run --config ../.golangci.yml ./...
	cd lab && $(GO) mod tidy -diff
	cd lab && $(GO) mod verify

bench: ## measure the limiter and its peers, for docs/evidence/benchmarks.md, and what docs/evidence/scaling.md and docs/capacity.md compute from it
	scripts/install-needed.sh redis-server wrk
	cd lab && $(GO) run . bench -docs ../docs
	cd lab && $(GO) run . scaling

bench-quick: ## run every benchmark for a moment, and write nothing
	scripts/install-needed.sh redis-server wrk
	$(GO) test -run '^$$' -bench . -benchtime 1x ./...
	cd lab && $(GO) test -run '^$$' -bench . -benchtime 1x ./...
	cd lab && $(GO) run . bench -quick

algorithms: ## draw and measure the algorithms, for docs/evidence/algorithms.md
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . algorithms

calls: ## count the calls to Redis per request, for docs/evidence/calls.md
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . calls

faults: ## break Redis in many ways while Caddy serves, for docs/evidence/faults.md
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . faults

guarantees: ## measure what clients get against the bounds, for docs/evidence/guarantees.md
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . guarantees

scaling: ## compute what many Caddys and shards need, for docs/evidence/scaling.md and docs/capacity.md
	cd lab && $(GO) run . scaling

packages: ## draw what the packages of the product import, for docs/design.md
	cd lab && $(GO) run . packages

fmt: $(GOLANGCI) ## format the code and group its imports
	gofmt -w .
	$(GOLANGCI) fmt ./...
	cd lab && ../$(GOLANGCI) fmt --config ../.golangci.yml ./...

demo: ## show the limiter at work on Redis servers of its own
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . demo

# Built from source once per version.
$(GOLANGCI):
	GOBIN=$(CURDIR)/bin $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv bin/golangci-lint $@
