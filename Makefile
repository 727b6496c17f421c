# make demo and make test do their own set-up on a fresh Debian or Ubuntu machine with Rust.
.PHONY: setup lint test
setup:
	sh tests/setup.sh

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

test: setup
	cargo test --workspace --locked
