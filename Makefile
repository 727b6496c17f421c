# make demo and make test do their own set-up on a fresh Debian or Ubuntu machine with Rust.
.PHONY: setup lint test demo rig bench
setup:
	sh tests/setup.sh

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

# The crash suite says how many stores failed and how many deaths were mended, so it is run once more, aloud.
test: setup
	cargo test --workspace --locked
	cargo test --quiet --locked --package gpuward-tests --test crash -- --show-output

# The shipped daemon on a real kernel. RIG names cases; none: all.
rig: setup
	tests/rig/run $(RIG)

bench: setup
	cargo build --release --locked --bins
	cargo bench --locked --package gpuward-tests

# `make demo SHELL=1` stays at a prompt on the simulated host. SHELL is make's own variable too: recipes go on with /bin/sh.
DEMO := -- tests/demo.sh
ifeq ($(origin SHELL),command line)
DEMO := --shell
override SHELL := /bin/sh
endif

demo: setup
	cargo build --quiet --locked --bins
	target/debug/gpuward-sim dgx-h100 $(DEMO)

# The daemon, the command and what belongs to them; packages set DESTDIR. PROFILE is the one they were built with.
PROFILE ?= release
CARGO_TARGET ?= target
BUILT = $(CARGO_TARGET)/$(PROFILE)
SHARE = $(DESTDIR)/usr/share
.PHONY: install
install:
	install -d $(DESTDIR)/usr/bin $(SHARE)/bash-completion/completions $(SHARE)/man/man1
	install -m 755 $(BUILT)/gpuwardd $(BUILT)/gpuward $(DESTDIR)/usr/bin
	$(BUILT)/gpuward completions bash > $(SHARE)/bash-completion/completions/gpuward
	$(BUILT)/gpuward man $(SHARE)/man/man1
	install -D -m 644 manager/data/org.gpuward1.conf $(SHARE)/dbus-1/system.d/org.gpuward1.conf
	install -D -m 644 manager/data/org.gpuward1.service $(SHARE)/dbus-1/system-services/org.gpuward1.service
	install -D -m 644 manager/data/org.gpuward1.xml $(SHARE)/dbus-1/interfaces/org.gpuward1.xml
	install -D -m 644 manager/data/org.gpuward1.policy $(SHARE)/polkit-1/actions/org.gpuward1.policy
	install -D -m 644 manager/data/50-gpuward.rules $(SHARE)/polkit-1/rules.d/50-gpuward.rules
	install -D -m 644 manager/data/gpuward-restore.service $(DESTDIR)/usr/lib/systemd/system/gpuward-restore.service
	install -D -m 644 manager/data/gpuwardd.service $(DESTDIR)/usr/lib/systemd/system/gpuwardd.service
	install -D -m 644 manager/data/gpuward.sysusers $(DESTDIR)/usr/lib/sysusers.d/gpuward.conf
	install -D -m 644 manager/data/gpuward.tmpfiles $(DESTDIR)/usr/lib/tmpfiles.d/gpuward.conf
	install -D -m 644 manager/data/gpuward.modules-load $(DESTDIR)/usr/lib/modules-load.d/gpuward.conf
	install -D -m 755 manager/data/boot/pin $(DESTDIR)/usr/lib/gpuward/pin
	install -D -m 644 manager/data/boot/gpuward-pin.service $(DESTDIR)/usr/lib/systemd/system/gpuward-pin.service
	install -D -m 644 manager/data/boot/05-gpuward.rules $(DESTDIR)/usr/lib/udev/rules.d/05-gpuward.rules
	install -D -m 644 manager/data/boot/modprobe.conf $(DESTDIR)/usr/lib/modprobe.d/gpuward.conf
	install -D -m 755 manager/data/boot/initramfs-hook $(SHARE)/initramfs-tools/hooks/gpuward
	install -D -m 755 manager/data/boot/initramfs-init-top $(SHARE)/initramfs-tools/scripts/init-top/gpuward
	install -D -m 755 manager/data/boot/dracut-module-setup.sh $(DESTDIR)/usr/lib/dracut/modules.d/90gpuward/module-setup.sh
	install -D -m 755 manager/data/boot/dracut-pre-udev.sh $(DESTDIR)/usr/lib/dracut/modules.d/90gpuward/gpuward-pin.sh
	install -D -m 755 manager/data/50-gpuward $(DESTDIR)/etc/libvirt/hooks/qemu.d/50-gpuward
	install -D -m 644 manager/data/gpuward.toml $(DESTDIR)/etc/gpuward/gpuward.toml
