# GNU make. `make` lists the targets.

GO                ?= go
GOLANGCI_VERSION   = v2.15.0
GOLANGCI           = bin/golangci-lint-$(GOLANGCI_VERSION)
FUZZTIME          ?= 3s
# Without what debuggers need, test binaries are linked in two thirds of the time. make lint vets. A package takes
# two minutes, and twenty with a fifth of a machine.
TEST               = $(GO) test -vet=off -ldflags='-s -w' -shuffle=on -timeout 60m
# Lists the packages with tests that make test runs. Those of the build tag check belong to make check.
LIST_TESTED        = $(GO) list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./...
# Packages whose tests mostly wait run first and beside others, one more at a time than there are processors:
# none of them is left to wait alone.
WAITING            = e2e internal/redis internal/redis/wire internal/redis/operate service limit examples
PROCESSORS         = $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
BESIDE             = -p $$(($(PROCESSORS) + 1)) $(WAITING:%=./%)
# What bench-quick runs with, and the packages that have benchmarks.
BENCH_QUICK        = $(TEST) -bench . -benchtime 1x
LIST_BENCHMARKS    = grep -rl --include='*_test.go' --exclude-dir=lab --exclude-dir=contrib '^func Benchmark' . | sed 's,/[^/]*$$,,' | sort -u
# The flags of scripts/cputime, which prints the cost of make test.
CPUTIME           ?=
# make check and make check-all run packages with concurrent code with the race detector, and UNRACED without:
# documents, configs, arithmetic, commands, the page in a browser, simulations, support of tests.
RACE               = CGO_ENABLED=1 $(TEST) -race -timeout $(RACETIME)
UNRACED            = caddy-shardlimit$$|/(docs|examples|scripts|store|internal/(body|caddyproc|clientkey|commands|contain|identity|loadgen|option|process|redistest|retryafter|simredis|simstore|simulation|storetest|sweep))(/|$$)
# -count=1 because it tests the last commit, which Go does not see change.
BUILD              = $(GO) test -tags build -count=1 -timeout 30m -v ./e2e/build ./e2e/clients
# Packages whose tests take longest with the race detector run first.
LONGEST            = internal/redis internal/ledger internal/limiter internal/redis/wire
# The servers of the family that make family runs with, of those that make servers unpacks.
SERVERS           ?= redis-server-8.0 valkey-server-8.0 valkey-server-8.1 valkey-server-9.1
# make test runs with Debian's redis-server. make check runs with REDISTEST_SERVER, or the newest of the family,
# packages with concurrent code, the pairs, the adversary, and of the other tests of whole Caddys those that depend on the server.
NEWEST             = $(or $(REDISTEST_SERVER),$(CURDIR)/bin/servers/valkey-server-9.1)
WITH_NEWEST        = REDISTEST_SERVER=$(NEWEST) REDISTEST_FAMILY=$$(command -v redis-server)
# DEPENDENT are tests of whole Caddys that depend on the server; FAMILY adds the pairs of features and the adversary.
DEPENDENT          = Sentinel|Cluster|Shard|Failover|Rights|TLS|Check|Login|Reshard|Overrides
FAMILY             = ^Test(Pairs|Adversary)$$|$(DEPENDENT)
# The files of ./e2e whose tests run with the race detector, because requests overlap, with each other or with a
# change. The tests of the other files do one thing at a time.
OVERLAP            = aborts alone batches connections counting grpc leases ledger obey outage outage_check reloads rollout rules settle simulate waiting
OVERLAPPING        = ^($$(awk -F '[ (]' '/^func Test/ { printf "%s%s", sep, $$2; sep = "|" }' $(OVERLAP:%=e2e/%_test.go)))$$
# Tests that run without the race detector, which makes them slow: models.
ALONE              = ^Test(Model|OverridesInAnyHistory)$$
# Tests of the laboratory that need all of the machine for a minute, which make bench-quick runs.
MEASURES           = ^Test(Run|RunMeasuresAll)$$
# Its own libraries are none of go.mod.
GORELEASER         = $(GO) run github.com/goreleaser/goreleaser/v2@v2.15.1
SYFT               = bin/syft/v1.57.1/syft
# The systems that make release-check builds for, such as linux_amd64; all if it is empty.
TARGETS           ?=
# What scripts/install-needed.sh unpacks for those who are not root.
export PATH := $(PATH):$(CURDIR)/bin/needed
# How many simulated histories make soak goes through: about twenty minutes' worth.
SOAK              ?= 10000

.DEFAULT_GOAL := help
.PHONY: help servers family build run test weight race race-caddys race-packages unraced lab check fuzz-build-model check-all contrib release-check release model soak lint bench bench-quick evidence algorithms calls faults guarantees scaling zones fmt demo

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

# With a version, which is any, xcaddy asks nobody for the versions of the module.
build: ## build Caddy with this checkout, into ./caddy
	$(GO) tool xcaddy build --with github.com/shardlimit/caddy-shardlimit@v0.0.0=. --output caddy

run: ## run Caddy with Caddyfile.example
	$(GO) run ./cmd/caddy run --config Caddyfile.example

# internal/redistest sets how many tests of a package run in parallel.
test: ## install redis-server if it is missing, and run the test of every promise once
	@echo "make test: after 'go run ./cmd/caddy' Go compiles the tests for a minute or two, which then take about three minutes."
	@scripts/install-needed.sh redis-server
	@packages=$$($(LIST_TESTED)) && $(GO) run ./scripts/cputime $(CPUTIME) $(TEST) $(BESIDE) $$packages

weight: ## write docs/weight.md: how large the project is
	$(GO) run ./scripts/weight

race:
	@$(MAKE) --no-print-directory -j 2 -O race-caddys race-packages

race-caddys:
	tests="$(OVERLAPPING)" && $(RACE) -run "$$tests" ./e2e

race-packages:
	packages=$$($(GO) list ./...) && $(WITH_NEWEST) $(RACE) -skip '$(ALONE)' $(LONGEST:%=./%) $$(echo "$$packages" | grep -vE '/e2e$$|$(UNRACED)')

unraced:
	packages=$$($(GO) list ./...) && $(TEST) $$(echo "$$packages" | grep -E '$(UNRACED)')
	tests="$(OVERLAPPING)" && $(WITH_NEWEST) $(TEST) -run '$(DEPENDENT)' -skip "$$tests" ./e2e
	tests="$(OVERLAPPING)" && $(TEST) -skip '$(FAMILY)|'"$$tests" ./e2e
	$(WITH_NEWEST) SWEEP=$${SWEEP:-more} $(TEST) -run '^Test(Pairs|Adversary)$$' ./e2e
	SWEEP=$${SWEEP:-more} $(TEST) -run '$(ALONE)' ./internal/ledger ./internal/redis/operate
	SWEEP=all $(TEST) -run '^TestDeniedCommandsLeaveNoPartialBucket$$' ./internal/redis

lab:
	cd lab && $(TEST) -p 3 -skip '$(MEASURES)' ./...
	cd contrib && $(TEST) ./...

# Tests that make test leaves out have this build tag. Programs that tests build get it too.
check check-all family lint bench-quick soak fmt: export GOFLAGS += -tags=check

check: export RACETIME = 40m
check: $(if $(REDISTEST_SERVER),,servers) ## run all tests, those of make test and all others, with the race detector where code runs concurrently, and with Valkey where the server counts: pairs of features, simulations, the laboratory, contrib, the browser, other proxies; each fuzz target for FUZZTIME, the README's build, and a sample of the model
	scripts/install-needed.sh
	@$(MAKE) --no-print-directory race
	@UNGUIDED=1 $(MAKE) --no-print-directory -j 3 -O fuzz-build-model unraced lab

fuzz-build-model:
	FUZZTIME=$(FUZZTIME) scripts/fuzz.sh
	$(BUILD) -skip 'TestBuild/(oldest|tagged)'
	scripts/model.sh

check-all: export SWEEP = all
check-all: export RACETIME = 4h
check-all: $(if $(REDISTEST_SERVER),,servers) ## run what make check does with all pairs of features, all cases of all sweeps, and the whole model, in hours
	scripts/install-needed.sh
	@$(MAKE) --no-print-directory race unraced lab family
	@$(MAKE) --no-print-directory fuzz-build-model contrib FUZZTIME=1m

contrib: ## build the last commit by the README's command, with the newest and the oldest Caddy and Go, and run what that builds
	$(BUILD)

release-check: $(SYFT) ## build what a release of the last commit has, but for images and signatures, look into it, and install the deb into a folder; render the chart
	cd contrib && $(TEST) ./...
	PATH=$(CURDIR)/$(dir $(SYFT)):$$PATH GORELEASER='$(GORELEASER)' TARGETS='$(TARGETS)' $(GO) test -tags build,release -count=1 -timeout 90m -v -run 'TestRelease$$' ./e2e/build

# The entry of the changelog is outside dist, which GoReleaser empties.
release: $(SYFT) ## publish the tag that is checked out, as a draft with its entry of the changelog; the workflow of releases runs it
	grep -q "^## $$(git describe --exact-match --tags | sed 's/^v//') (" CHANGELOG.md
	mkdir -p bin
	awk '/^## / {section++; next} section == 1' CHANGELOG.md >bin/release-notes.md
	PATH=$(CURDIR)/$(dir $(SYFT)):$$PATH $(GORELEASER) release --clean --release-notes bin/release-notes.md

model: ## check the protocol of charges between processes with Spin
	scripts/install-needed.sh spin cc
	SWEEP=all scripts/model.sh

soak: ## ten minutes of faults under load, then many more simulated histories
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . soak
	$(GO) test -run TestSimulation -timeout 3h ./internal/simulation -simulation.seeds $(SOAK) -simulation.seed $$(date +%s)

servers: ## unpack the other servers that the tests run with, into bin/servers: see REDISTEST_SERVER
	scripts/servers.sh

# What depends on the server: the stores, replication, Sentinel, Cluster, resharding, rights, TLS and
# check, and databases of clusters.
family: servers ## run the tests that depend on the server with each of SERVERS
	scripts/install-needed.sh redis-server nutcracker haproxy
	REDISTEST_FAMILY=$$(printf ':$(CURDIR)/bin/servers/%s' $(SERVERS)) $(TEST) -run 'TestDatabaseOfACluster' ./internal/redis
	@for server in $(SERVERS); do \
		echo "With $$server:"; \
		REDISTEST_SERVER=$(CURDIR)/bin/servers/$$server $(TEST) ./internal/redis/... ./redisstore || exit 1; \
		REDISTEST_SERVER=$(CURDIR)/bin/servers/$$server $(TEST) -run '$(FAMILY)' ./e2e || exit 1; \
	done

# golangci-lint does what go vet does, for the system that it runs on; for the others, and for the
# oldest Go, it is enough to know that the code compiles.
lint: $(GOLANGCI) ## check format, types for macOS, FreeBSD and Windows and with the oldest Go, golangci-lint, go.mod and the modules
	@files=$$(gofmt -l .) || exit 1; \
	if [ -n "$$files" ]; then echo "not formatted (see make fmt):"; echo "$$files"; exit 1; fi
	$(GO) build -o bin/typecheck ./scripts/typecheck
	@for dir in . lab; do \
		echo "typecheck darwin freebsd windows in $$dir"; \
		(cd $$dir && $(CURDIR)/bin/typecheck darwin freebsd windows) || exit 1; \
	done
	GOTOOLCHAIN=go$$(sed -n 's/^go //p' go.mod) bin/typecheck linux
	$(GOLANGCI) run --build-tags build,check,release ./...
	$(GO) mod tidy -diff
	$(GO) mod verify
	@for dir in lab contrib e2e/clients/call; do \
		(cd $$dir && $(CURDIR)/$(GOLANGCI) run --config $(CURDIR)/.golangci.yml ./... && $(GO) mod tidy -diff && $(GO) mod verify) || exit 1; \
	done

evidence: bench guarantees faults calls algorithms ## measure all of docs/evidence.md, in about two hours, into dist/evidence
	cd lab && $(GO) run . scaling -figures ../dist/evidence/benchmarks.md -capacity ''

bench: servers ## measure the limiter and its peers, and Redis beside Valkey, into dist/evidence
	scripts/install-needed.sh redis-server
	cd lab && REDISTEST_FAMILY=$(CURDIR)/bin/servers/valkey-server-9.1 $(GO) run . bench

bench-quick: ## run every benchmark for a moment, with the tests that what it measures is whole, and write nothing
	scripts/install-needed.sh redis-server
	$(BENCH_QUICK) -run '^$$' $$($(LIST_BENCHMARKS))
	cd lab && $(BENCH_QUICK) -run '$(MEASURES)' ./bench/... $$($(LIST_BENCHMARKS))

algorithms: ## draw and measure the algorithms, into dist/evidence
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . algorithms

calls: ## count the calls to Redis per request, into dist/evidence
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . calls

faults: ## break Redis in many ways while Caddy serves, into dist/evidence
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . faults

guarantees: ## measure what clients get against the bounds, into dist/evidence
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . guarantees

scaling: ## compute the servers that traffic needs from docs/evidence.md, for docs/capacity.md
	cd lab && $(GO) run . scaling

zones: ## measure Caddys with ten thousand zones
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . zones

fmt: $(GOLANGCI) ## format the code and group its imports
	gofmt -w .
	$(GOLANGCI) fmt ./...
	@for dir in lab contrib; do (cd $$dir && ../$(GOLANGCI) fmt --config ../.golangci.yml ./...) || exit 1; done

demo: ## show the limiter at work on Redis servers of its own
	scripts/install-needed.sh redis-server
	cd lab && $(GO) run . demo

# Built from source once per version.
$(GOLANGCI):
	GOBIN=$(CURDIR)/bin $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv bin/golangci-lint $@

# It lists what is in each archive of a release.
$(SYFT):
	GOBIN=$(CURDIR)/$(@D) $(GO) install github.com/anchore/syft/cmd/syft@$(notdir $(@D))
