# make demo and make test do their own set-up on a fresh Debian or Ubuntu machine with Rust.
.PHONY: setup lint test demo
setup:
	sh tests/setup.sh

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

test: setup
	cargo test --workspace --locked

# `make demo SHELL=1` stays at a prompt on the simulated host. SHELL is make's own variable too: recipes go on with /bin/sh.
DEMO := -- tests/demo.sh
ifeq ($(origin SHELL),command line)
DEMO := --shell
override SHELL := /bin/sh
endif

demo: setup
	cargo build --quiet --locked --bins
	target/debug/gpuward-sim dgx-h100 $(DEMO)
