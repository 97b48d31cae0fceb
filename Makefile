# Everything that a clone needs. `make demo` and `make test` install what a new host needs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The agent is PID 1 of a guest that holds nothing else: one static binary, in a target directory of its own
# so that its flags don't rebuild the host's crates. It lies in memory as one segment that begins with a huge page:
# see `settle` in crates/agent/src/init.rs.
AGENT_TARGET := x86_64-unknown-linux-gnu
AGENT := target/agent/$(AGENT_TARGET)/release/sandboxer-agent
STACK ?= target/stack
INSTALLED := sandboxer sandboxer-front sandboxer-cli sandboxer-share containerd-shim-sandboxer-v1

# Of bash, zsh and fish.
COMPLETIONS := /usr/share/bash-completion/completions/sandboxer-cli /usr/share/zsh/vendor-completions/_sandboxer-cli \
	/usr/share/fish/vendor_completions.d/sandboxer-cli.fish

DESTDIR ?=
REVISION ?= 1
FUZZ_SECONDS ?= 60

.PHONY: help deps tools kernel agent bench-helper bench-image bench-native bench-vm guest-image build build-failing emulator node test-kvm test-contract test-placement install uninstall deb installer-image test-deb test-chart test-reproducible up down demo test test-units test-stack test-containerd test-kubernetes test-critest soak reliability bench bench-kvm bench-gate bench-record check-arm64 lint fuzz fmt clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

deps: ## install the Debian packages that are missing
	@scripts/install-deps.sh

tools: deps ## build containerd and runc, unpatched, into the cache
	@scripts/tools.sh

# Generated code has the path of the clone in it, and crates that of cargo's directory: renamed, equal sources give equal bytes anywhere.
agent: deps
	LIBSECCOMP_LINK_TYPE=static LIBSECCOMP_LIB_PATH=$$(dirname "$$(gcc -print-file-name=libseccomp.a)") \
	RUSTFLAGS="-C target-feature=+crt-static -C link-args=-Wl,-z,max-page-size=0x200000,--no-rosegment,-z,pack-relative-relocs \
	--remap-path-prefix=$(CURDIR)=. --remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}=/cargo" \
	cargo build --release -p sandboxer-agent --target $(AGENT_TARGET) --target-dir target/agent

# Static, so that it runs in any image and under any runtime. In a target directory of its own, as the agent's is.
BENCH_IMAGES ?= bench-small
bench-helper: deps
	RUSTFLAGS='-C target-feature=+crt-static' \
	cargo build --release -p sandboxer-bench-helper --target $(AGENT_TARGET) --target-dir target/bench-helper

bench-image: bench-helper ## make images of the workloads' tools (BENCH_IMAGES='bench-small bench-build') and load them into STACK, if it runs
	@for image in $(BENCH_IMAGES); do scripts/bench-image.sh $$image; done
	@if [[ -e $(STACK)/.stack ]]; then scripts/stack.sh load $(STACK) $(BENCH_IMAGES); fi

NATIVE_ROOT ?= target/bench-native
NATIVE_IMAGE ?= bench-small
bench-native: bench-helper ## unpack NATIVE_IMAGE (bench-small: the workloads' tools) into NATIVE_ROOT (target/bench-native), for the series `native`
	@scripts/bench-image.sh $(NATIVE_IMAGE) target/bench-helper/$(AGENT_TARGET)/release/bench-helper $(NATIVE_ROOT)

bench-vm: bench-helper ## make the disk of the series `vm` (Debian with systemd and the workloads' tools) and print its path, for --vm-image
	@scripts/bench-vm.sh

kernel: deps ## build the guest kernel, or find it in the cache
	@scripts/guest-image.sh kernel

guest-image: agent ## build the guest kernel (cached, or SANDBOXER_KERNEL=…), the initramfs and a list of their parts into target/guest
	@scripts/guest-image.sh all $(AGENT)
	@scripts/guest-sbom.sh

build: deps ## build the daemon, CLI, shim and share server into target/release
	cargo build --release -p sandboxer -p sandboxer-cli -p sandboxer-share -p containerd-shim-sandboxer-v1

# What cargo builds for the demo, one after the other.
programs: build agent

build-failing: build ## also build the daemon with failpoints, at which tests kill it
	cargo build --release -p sandboxer --bin sandboxer-failing --features failpoints

emulator: deps ## build the QEMU that emulates node VMs, so that none of their guests is lost (cached)
	@scripts/node/emulator.sh >/dev/null

node: build build-failing guest-image tools ## make a node VM with a usable KVM, for scripts/node.sh run and shell
	@scripts/node.sh build

# Builds nothing, so that root needs no toolchain: `make build guest-image && sudo make install`.
# /etc is the administrator's; the configuration there is optional and never touched.
install: ## install the results of `build` and `guest-image`, and the service, on this host (DESTDIR=… for a package)
	install -D -t $(DESTDIR)/usr/bin $(addprefix target/release/,$(INSTALLED))
	install -D -m 0644 -t $(DESTDIR)/usr/lib/sandboxer target/guest/vmlinux target/guest/initramfs.cpio
	install -D -m 0644 -t $(DESTDIR)/usr/lib/systemd/system vmm-configs/systemd/sandboxer.service
	install -D -m 0644 -t $(DESTDIR)/usr/share/sandboxer vmm-configs/sandboxer.toml
	install -D -m 0644 vmm-configs/containerd/sandboxer.toml $(DESTDIR)/usr/share/sandboxer/containerd.toml
	target/release/sandboxer-cli man $(DESTDIR)/usr/share/man
	install -d $(addprefix $(DESTDIR),$(dir $(COMPLETIONS)))
	target/release/sandboxer-cli completion bash >$(DESTDIR)$(word 1,$(COMPLETIONS))
	target/release/sandboxer-cli completion zsh >$(DESTDIR)$(word 2,$(COMPLETIONS))
	target/release/sandboxer-cli completion fish >$(DESTDIR)$(word 3,$(COMPLETIONS))

uninstall: ## remove the files of `install`; pods and /var/lib/sandboxer stay
	rm -f $(addprefix $(DESTDIR)/usr/bin/,$(INSTALLED)) $(DESTDIR)/usr/lib/systemd/system/sandboxer.service
	rm -f $(DESTDIR)/usr/share/man/man1/sandboxer-cli*.1 $(DESTDIR)/usr/share/man/man8/sandboxer.8 $(addprefix $(DESTDIR),$(COMPLETIONS))
	rm -rf $(DESTDIR)/usr/lib/sandboxer $(DESTDIR)/usr/share/sandboxer

deb: build guest-image ## build a Debian package of all that into target/deb (REVISION=1)
	@scripts/deb.sh $(REVISION)

test-deb: node emulator ## install, use, upgrade and remove that package in a node VM with systemd; nothing of it may stay
	@scripts/test-deb.sh

installer-image: build guest-image ## build the image of the chart's installer into target/installer, as an OCI archive (IMAGE=name:tag)
	@scripts/installer-image.sh $(IMAGE)

test-chart: build guest-image ## render the chart, check alerts and dashboard, run its installer on a throw-away node (needs root)
	@scripts/test-chart.sh

test-reproducible: guest-image ## build the guest image again, elsewhere and without caches; every byte must be the same
	@scripts/test-reproducible.sh

up: build guest-image tools ## start a stack to play with, in STACK (target/stack): then `source target/stack/env`
	@scripts/stack.sh up $(STACK)

down: ## stop that stack and remove all of it
	@scripts/stack.sh down $(STACK)

demo: deps ## show and measure five pods, each in its microVM; leaves nothing behind
	@scripts/side-by-side.sh programs kernel tools
	@$(MAKE) guest-image
	@scripts/demo.sh

test: test-units test-stack test-chart test-kvm test-deb ## run every test

test-units: build guest-image ## run the tests that need no containerd; some start a guest
	cargo test --workspace --exclude sandboxer-e2e --no-fail-fast
	cargo test -p sandboxer-front --features failpoints

test-stack: build build-failing guest-image tools ## run the tests on a real stack of their own (needs root)
	cargo test -p sandboxer-e2e

VERSIONS ?= 1.6.20 1.7.27 2.0.5 2.1.4 2.2.0 2.3.0 2.4.2
CASES ?= lifecycle,sandbox,container,streams,failure,daemon,worker,snapshotters,network,volumes
test-containerd: build build-failing guest-image ## run cases beside each of VERSIONS of containerd (CASES=all: every case); writes docs/compatibility.md (needs root)
	@scripts/test-containerd.sh "$(CASES)" $(VERSIONS)

# Some minutes, most of them kubelet's periods. The host's processors bound how many more.
test-kubernetes: build guest-image tools ## run a real kubelet on a stack: each case beside runc; writes docs/compatibility.md (needs root; builds Kubernetes once)
	@scripts/tools.sh kubernetes >/dev/null
	SANDBOXER_E2E_KUBERNETES=1 SANDBOXER_E2E_TABLE=$(CURDIR)/docs/compatibility.md \
	cargo test -p sandboxer-e2e --test kubernetes -- --nocapture

test-critest: build guest-image tools ## run critest, which must be on PATH, and compare with tests/critest/expected.tsv (needs root)
	@scripts/test-critest.sh

SOAK_SECONDS ?= 180
soak: build build-failing guest-image tools ## run churn for SOAK_SECONDS (180), half of them with kills; look for leaks (needs root)
	SANDBOXER_E2E_SOAK=$(SOAK_SECONDS) SANDBOXER_E2E_LIMIT=$$(($(SOAK_SECONDS) * 2 + 120)) \
	cargo test -p sandboxer-e2e --test e2e -- sandboxer::soak --nocapture

# Long: about half an hour on two cores without KVM.
reliability: build build-failing guest-image tools ## inject every fault, often, and run a soak; writes docs/reliability.md (needs root)
	SANDBOXER_E2E_RANDOM_KILLS=500 SANDBOXER_E2E_RANDOM_PODS=4 SANDBOXER_E2E_UPGRADE_PODS=20 SANDBOXER_E2E_LIMIT=3600 \
	SANDBOXER_E2E_REPORT=$(CURDIR)/docs/reliability.md \
	cargo test -p sandboxer-e2e --test e2e -- sandboxer::faults
	SANDBOXER_E2E_SOAK=$(SOAK_SECONDS) SANDBOXER_E2E_LIMIT=$$(($(SOAK_SECONDS) * 2 + 120)) \
	SANDBOXER_E2E_REPORT=$(CURDIR)/docs/reliability.md \
	cargo test -p sandboxer-e2e --test e2e -- sandboxer::soak --nocapture

bench: build guest-image tools ## run the start-up and memory benches
	cargo bench --workspace

# Hours on two cores: see the head of the script for parts of it.
bench-kvm: node emulator ## measure start-up and memory on KVM, in a node VM and virtual time, into target/bench-kvm
	@scripts/bench-kvm.sh

test-kvm: node emulator ## run the tests that need a usable KVM, in a node VM; CLOUD_HYPERVISOR=… and FIRECRACKER=… add these VMMs (PHASES='pods e2e' for more)
	@scripts/test-kvm.sh $(PHASES)

test-contract: node emulator ## run the contract of all VMMs, by doubles and real ones, and print each case by VMM
	@cargo test --quiet -p sandboxer --test vmm_contract --test cloud_hypervisor --test firecracker double
	@scripts/test-kvm.sh contract

test-placement: node emulator ## run the cases about NUMA nodes in a node VM with two, and print where pods' memory was
	@scripts/test-placement.sh

bench-gate: node emulator ## compare a few starts on KVM, in virtual time, with the last recorded ones; fails beyond 5 %
	@scripts/bench-gate.sh

bench-record: node emulator ## measure a few starts and append them to docs/results/history.csv, for bench-gate
	@scripts/bench-gate.sh record

check-arm64: deps ## check whether the workspace compiles for arm64
	@scripts/check-arm64.sh

lint: deps ## check formatting, clippy, dependencies' licences and sources; warnings are errors
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	@scripts/lint.sh

fuzz: deps ## run every fuzz target for FUZZ_SECONDS (60); TARGETS='…' selects some
	@scripts/fuzz.sh $(FUZZ_SECONDS) $(TARGETS)

fmt: ## format the code
	cargo fmt --all

clean: ## remove target; the cache (~/.cache/sandboxer) stays
	@if [[ -e $(STACK)/.stack ]]; then scripts/stack.sh down $(STACK); fi
	cargo clean
