# Everything that a clone needs. `make demo` and `make test` install what a new host needs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Profile of cargo: `release` is what is installed and measured; `quick`, for a first look and tests on emulated guests, builds in a
# fifth of the time.
SANDBOXER_PROFILE ?= release
export SANDBOXER_PROFILE
# Of the Debian packages, what these need.
demo up: export SANDBOXER_DEPS = demo
demo test test-fast test-guests test-units test-core test-stack test-stack-rest test-docker soak: export SANDBOXER_PROFILE = quick

# The agent is PID 1 of a guest that holds nothing else: one static binary, in a target directory of its own
# so that its flags don't rebuild the host's crates. It lies in memory as one segment that begins with a huge page:
# see `settle` in crates/agent/src/init.rs.
AGENT_TARGET := x86_64-unknown-linux-gnu
AGENT = target/agent/$(AGENT_TARGET)/$(SANDBOXER_PROFILE)/sandboxer-agent
STACK ?= target/stack
LAUNCHER := containerd-shim-sandboxer-v1
INSTALLED := sandboxer sandboxer-front sandboxer-cli sandboxer-share $(LAUNCHER)
# CRI-O takes no name without -v2.
LAUNCHER_OF_CRIO := containerd-shim-sandboxer-v2

# completions PROGRAM: of bash, zsh and fish.
completions = $(addprefix $(DESTDIR)/usr/share/,bash-completion/completions/$(1) zsh/vendor-completions/_$(1) fish/vendor_completions.d/$(1).fish)
# described PROGRAM: installs its man pages and completions.
define described
target/release/$(1) man $(DESTDIR)/usr/share/man
install -d $(dir $(call completions,$(1)))
target/release/$(1) completion bash >$(word 1,$(call completions,$(1)))
target/release/$(1) completion zsh >$(word 2,$(call completions,$(1)))
target/release/$(1) completion fish >$(word 3,$(call completions,$(1)))
endef
# removed: removes the directories of man pages and completions that are empty.
define removed
@for dir in $(addprefix $(DESTDIR)/usr/share/man/,man1 man8) $(dir $(call completions,x)); do \
	if [[ -d $$dir ]]; then rmdir --parents --ignore-fail-on-non-empty "$$dir"; fi; done
endef

DESTDIR ?=
REVISION ?= 1
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 180

##@ Start here
help: ## show this list
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

demo: ## show and measure pods, each in its microVM; leaves nothing behind (needs root)
	@scripts/demo.sh check
	@$(MAKE) deps
	@scripts/side-by-side.sh programs kernel tools
	@$(MAKE) guest-image
	@scripts/demo.sh

up: build-bench guest-image tools ## start a stack to play with, in STACK (target/stack): then `source target/stack/env`
	@scripts/stack.sh up $(STACK)

down: ## stop that stack and remove all of it
	@scripts/stack.sh down $(STACK)

test: ## run units, and end-to-end cases that touch each promise once (needs root)
	@scripts/test.sh

##@ Build
deps: ## install the Debian packages that are missing
	@scripts/install-deps.sh

tools: deps ## build containerd and runc, unpatched, into the cache
	@scripts/tools.sh

# Generated code has the path of the clone in it, and crates that of cargo's directory: renamed, equal sources give equal bytes anywhere.
# Only what is installed: such flags make cargo build every dependency again in each clone.
remap = $(if $(filter release,$(SANDBOXER_PROFILE)),--remap-path-prefix=$(CURDIR)=. --remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}=/cargo)
agent: deps
	LIBSECCOMP_LINK_TYPE=static LIBSECCOMP_LIB_PATH=$$(dirname "$$(gcc -print-file-name=libseccomp.a)") \
	RUSTFLAGS="-C target-feature=+crt-static -C link-args=-Wl,-z,max-page-size=0x200000,--no-rosegment,-z,pack-relative-relocs $(remap)" \
	cargo build --profile $(SANDBOXER_PROFILE) -p sandboxer-agent --target $(AGENT_TARGET) --target-dir target/agent

kernel: deps ## build the guest kernel, or find it in the cache
	@scripts/guest-image.sh kernel

guest-image: agent ## build the guest kernel (or SANDBOXER_KERNEL=…) and initramfs into target/guest
	@scripts/guest-image.sh all $(AGENT)
	@scripts/guest-sbom.sh

BUILD = cargo build --profile $(SANDBOXER_PROFILE) -p sandboxer -p sandboxer-cli -p sandboxer-share -p containerd-shim-sandboxer-v1
build: deps ## build all programs of the host into target/release (or SANDBOXER_PROFILE=quick)
	$(BUILD)

# With the same crates, so that cargo selects the same features and builds no dependency again.
build-bench: build ## also build sandboxer-bench, which measures workloads and judges results
	$(BUILD) -p sandboxer-bench

# What cargo builds for the demo, one after the other.
programs: build agent

build-failing: build ## also build the daemon with failpoints, at which tests kill it
	cargo build --profile $(SANDBOXER_PROFILE) -p sandboxer --bin sandboxer-failing --features failpoints

emulator: deps ## build the QEMU that emulates node VMs (cached)
	@scripts/node/emulator.sh >/dev/null

# Cases that kill the daemon at its failpoints run on emulated guests; `make build-failing node` brings that daemon, too.
node: build-bench guest-image tools ## make a node VM with a usable KVM, for scripts/node.sh run and shell
	@scripts/node.sh build

fmt: ## format the code
	cargo fmt --all

clean: ## remove target; the cache (~/.cache/sandboxer) stays
	@if [[ -e $(STACK)/.stack ]]; then scripts/stack.sh down $(STACK); fi
	cargo clean

##@ Test
test-all: lint test test-rest ## run every test that `make test` leaves out, too: an hour

# Kinds of tests, each with the profile of cargo that it needs.
test-rest:
	@scripts/test.sh rest

# Units in their crates: neither root nor a guest.
NO_GUEST := --workspace --exclude sandboxer-e2e --exclude sandboxer-agent
test-fast: deps ## run the tests that need neither root nor a guest
	@scripts/cargo-test.sh $(NO_GUEST) --lib --bins

test-units: build guest-image ## run all tests that need no containerd; some start a guest
	@scripts/cargo-test.sh --workspace --exclude sandboxer-e2e
	@scripts/cargo-test.sh -p sandboxer-front --features failpoints

# Of test-units, what test-fast leaves out. Of the same crates, so that cargo selects the same features and builds no dependency again.
test-guests: build guest-image
	@scripts/cargo-test.sh $(NO_GUEST) --test '*'
	@scripts/cargo-test.sh -p sandboxer-agent
	@scripts/cargo-test.sh -p sandboxer-front --features failpoints

test-stack: build build-failing guest-image tools ## run the end-to-end cases on a stack of their own (needs root)
	@scripts/cargo-test.sh -p sandboxer-e2e

# Of test-stack, what touches each promise once.
test-core: build build-failing guest-image tools
	@SANDBOXER_E2E_CORE=only scripts/cargo-test.sh -p sandboxer-e2e --test e2e

test-stack-rest: build build-failing guest-image tools
	@SANDBOXER_E2E_CORE=except scripts/cargo-test.sh -p sandboxer-e2e

# A shallow clone has no such history; the script says so, and the target fails.
test-versions: build build-failing guest-image tools ## run pods with the agent of the release before, built from this clone's history (needs root)
	@before=$$(scripts/agent-before.sh); \
	SANDBOXER_E2E_AGENT_BEFORE=$$before scripts/cargo-test.sh -p sandboxer-e2e --test e2e -- agents::

VERSIONS ?= 1.6.20 1.7.27 2.0.5 2.1.4 2.2.0 2.3.0 2.4.2
CASES ?= lifecycle,sandbox,container,streams,failure,daemon,worker,snapshotters,network,volumes
test-containerd: build build-failing guest-image ## run CASES beside each of VERSIONS of containerd; writes docs/compatibility.md (needs root)
	@scripts/test-containerd.sh "$(CASES)" $(VERSIONS)

# Some minutes, most of them kubelet's periods. The host's processors bound how many more.
test-kubernetes: build guest-image tools ## run a real kubelet: each case beside runc; writes docs/compatibility.md (needs root)
	@scripts/tools.sh kubernetes controllers >/dev/null
	SANDBOXER_E2E_KUBERNETES=1 SANDBOXER_E2E_TABLE=$(CURDIR)/docs/compatibility.md \
	cargo test -p sandboxer-e2e --test kubernetes -- --nocapture

# Docker's daemon and command line take some minutes to build, once.
test-docker: build build-failing guest-image tools ## run containers by docker, each case beside runc, in a network of their own (needs root)
	@programs=$$(scripts/tools.sh docker | paste -sd :); \
	SANDBOXER_E2E_DOCKER=$$programs SANDBOXER_E2E_ONLY=docker scripts/cargo-test.sh -p sandboxer-e2e --test e2e

# CRI-O takes some minutes to build, once. Some cases are as many of other files.
test-crio: build build-failing guest-image tools ## run pods by CRI-O, each case beside its runc (needs root)
	@programs=$$(scripts/tools.sh crio crictl | paste -sd :); \
	SANDBOXER_E2E_CRIO=$$programs SANDBOXER_E2E_LIMIT=900 SANDBOXER_E2E_ONLY=crio scripts/cargo-test.sh -p sandboxer-e2e --test e2e

test-critest: build guest-image tools ## run critest, which must be on PATH, and compare with what is expected (needs root)
	@scripts/test-critest.sh

SECONDS ?= 600
test-differential: build build-failing guest-image tools ## ask runc and the daemon the same at random, for SECONDS (600) each; SEED=… again (needs root)
	POOL=1 SANDBOXER_E2E_DIFFERENTIAL=$(SECONDS) $(if $(SEED),SANDBOXER_E2E_SEED=$(SEED)) \
	cargo test -p sandboxer-e2e --test differential -- --nocapture

PROGRAMS ?=
test-programs: build guest-image tools ## run databases, languages, systemd, Docker and others beside runc (PROGRAMS='redis …'); writes docs/compatibility.md (needs root)
	SANDBOXER_E2E_PROGRAMS=1 SANDBOXER_E2E_TABLE=$(CURDIR)/docs/compatibility.md SANDBOXER_E2E_ONLY='$(PROGRAMS)' \
	cargo test -p sandboxer-e2e --test programs

test-kvm: node emulator ## run what needs a KVM, in node VMs; CLOUD_HYPERVISOR=… FIRECRACKER=… add VMMs, PHASES='pods e2e' cases
	@scripts/test-kvm.sh $(PHASES)

test-contract: node emulator ## run the contract of all VMMs, by doubles and real ones, and print each case by VMM
	@cargo test --quiet -p sandboxer --test vmm_contract --test cloud_hypervisor --test firecracker double
	@scripts/test-kvm.sh contract

test-placement: node emulator ## run the cases about NUMA nodes in a node VM with two
	@scripts/test-placement.sh

test-deb: node emulator ## install, use, upgrade and remove the Debian package in a node VM with systemd
	@scripts/test-deb.sh

test-chart: build guest-image ## render the Helm chart, check alerts and dashboard, run its installer (needs root)
	@scripts/test-chart.sh

test-rights: deps ## ask a real API server what the chart's accounts may do (needs root; builds the server once, 3 to 25 min)
	@scripts/test-chart.sh test_rights

test-reproducible: guest-image ## build the guest image again, elsewhere and without caches; every byte must be the same
	@scripts/test-reproducible.sh

soak: build build-failing guest-image tools ## start and end pods for SOAK_SECONDS (180), with kills; look for leaks (needs root)
	SANDBOXER_E2E_SOAK=$(SOAK_SECONDS) SANDBOXER_E2E_LIMIT=$$(($(SOAK_SECONDS) * 2 + 120)) \
	cargo test -p sandboxer-e2e --test e2e -- sandboxer::soak --nocapture

# Long: about half an hour on two cores without KVM.
reliability: build build-failing guest-image tools ## inject every fault, often; writes docs/reliability.md (needs root)
	SANDBOXER_E2E_RANDOM_KILLS=500 SANDBOXER_E2E_RANDOM_PODS=4 SANDBOXER_E2E_UPGRADE_PODS=20 SANDBOXER_E2E_LIMIT=3600 \
	SANDBOXER_E2E_REPORT=$(CURDIR)/docs/reliability.md \
	cargo test -p sandboxer-e2e --test e2e -- sandboxer::faults
	SANDBOXER_E2E_SOAK=$(SOAK_SECONDS) SANDBOXER_E2E_LIMIT=$$(($(SOAK_SECONDS) * 2 + 120)) \
	SANDBOXER_E2E_REPORT=$(CURDIR)/docs/reliability.md \
	cargo test -p sandboxer-e2e --test e2e -- sandboxer::soak --nocapture

fuzz: deps ## run every fuzz target for FUZZ_SECONDS (60); TARGETS='…' selects some
	@scripts/fuzz.sh $(FUZZ_SECONDS) $(TARGETS)

check-arm64: deps ## check whether the workspace compiles for arm64
	@scripts/check-arm64.sh

lint: deps ## check formatting, clippy, dependencies' licences and sources; warnings are errors
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	@scripts/lint.sh

##@ Measure
bench: build guest-image tools ## run the start-up and memory benches
	cargo bench --workspace

# Hours on two cores: see the head of the script for parts of it.
bench-kvm: node emulator ## measure start-up and memory on KVM, in a node VM and virtual time
	@scripts/bench-kvm.sh

# Hours, too. A KATA_DIR that is incomplete is refused before anything is built.
bench-kata: ## measure Kata, from its files in KATA_DIR (see docs/compare-kata.md), beside sandboxer and runc
	@scripts/bench-kata.sh --check
	@$(MAKE) node emulator
	@scripts/bench-kata.sh

# gVisor's release for containerd is built from its Go modules: Debian's package has no shim (docs/workloads.md).
bench-gvisor: ## measure gVisor beside sandboxer and runc: start-up, groups of 8, memory, commands; an hour
	@STACK_GVISOR=1 $(MAKE) node emulator
	@export STACK_GVISOR=1 BENCH_OTHERS=gvisor BENCH_OUT=target/bench-gvisor BENCH_VMMS=qemu; \
	BENCH_SERIAL=10 BENCH_GROUP=8 BENCH_COUNTS=1,5,10 scripts/bench-kvm.sh serial groups memory commands

bench-gate: node emulator ## compare a few starts on KVM, in virtual time, with the last recorded ones; fails beyond 5 %
	@scripts/bench-gate.sh

bench-record: node emulator ## measure a few starts and append them to docs/results/history.csv, for bench-gate
	@scripts/bench-gate.sh record

# Static, so that it runs in any image and under any runtime. In a target directory of its own, as the agent's is.
BENCH_IMAGES ?= bench-small
bench-helper: deps
	RUSTFLAGS='-C target-feature=+crt-static' \
	cargo build --release -p sandboxer-bench-helper --target $(AGENT_TARGET) --target-dir target/bench-helper

bench-image: bench-helper ## make images of the workloads' tools (BENCH_IMAGES='bench-small bench-build'), load them into STACK
	@for image in $(BENCH_IMAGES); do scripts/bench-image.sh $$image; done
	@if [[ -e $(STACK)/.stack ]]; then scripts/stack.sh load $(STACK) $(BENCH_IMAGES); fi

NATIVE_ROOT ?= target/bench-native
NATIVE_IMAGE ?= bench-small
bench-native: bench-helper ## unpack NATIVE_IMAGE (bench-small) into NATIVE_ROOT, for the series `native`
	@scripts/bench-image.sh $(NATIVE_IMAGE) target/bench-helper/$(AGENT_TARGET)/release/bench-helper $(NATIVE_ROOT)

bench-vm: bench-helper ## make the disk of the series `vm`, Debian with systemd, and print its path
	@scripts/bench-vm.sh

##@ Package
# Builds nothing, so that root needs no toolchain: `make build guest-image && sudo make install`.
# /etc is the administrator's; the configuration there is optional and never touched.
install: ## install the results of `build` and `guest-image`, and the service, on this host (DESTDIR=… for a package)
	install -D -t $(DESTDIR)/usr/bin $(addprefix target/release/,$(INSTALLED))
	ln -sfn $(LAUNCHER) $(DESTDIR)/usr/bin/$(LAUNCHER_OF_CRIO)
	install -D -m 0644 -t $(DESTDIR)/usr/lib/sandboxer target/guest/vmlinux target/guest/initramfs.cpio
	install -D -m 0644 -t $(DESTDIR)/usr/lib/systemd/system vmm-configs/systemd/sandboxer.service
	install -D -m 0644 -t $(DESTDIR)/usr/share/sandboxer vmm-configs/sandboxer.toml
	install -D -m 0644 vmm-configs/containerd/sandboxer.toml $(DESTDIR)/usr/share/sandboxer/containerd.toml
	$(call described,sandboxer-cli)

uninstall: ## remove the files of `install`; pods and /var/lib/sandboxer stay
	rm -f $(addprefix $(DESTDIR)/usr/bin/,$(INSTALLED) $(LAUNCHER_OF_CRIO)) $(DESTDIR)/usr/lib/systemd/system/sandboxer.service
	rm -f $(DESTDIR)/usr/share/man/man1/sandboxer-cli*.1 $(DESTDIR)/usr/share/man/man8/sandboxer.8 $(call completions,sandboxer-cli)
	rm -rf $(DESTDIR)/usr/lib/sandboxer $(DESTDIR)/usr/share/sandboxer
	$(removed)

install-bench: ## install sandboxer-bench, the result of `build-bench`, on this host (DESTDIR=… for a package)
	install -D -t $(DESTDIR)/usr/bin target/release/sandboxer-bench
	$(call described,sandboxer-bench)

uninstall-bench: ## remove the files of `install-bench`
	rm -f $(DESTDIR)/usr/bin/sandboxer-bench $(DESTDIR)/usr/share/man/man1/sandboxer-bench*.1 $(call completions,sandboxer-bench)
	$(removed)

deb: build-bench guest-image ## build two Debian packages into target/deb: sandboxer, and sandboxer-bench (REVISION=1)
	@scripts/deb.sh $(REVISION)

installer-image: build guest-image ## build the image of the chart's installer, as an OCI archive (IMAGE=name:tag)
	@scripts/installer-image.sh $(IMAGE)

.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*/\1/p' Makefile)
