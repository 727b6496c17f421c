#!/bin/sh
# A short tour on a simulated DGX H100, by itself: `make demo`. Every command is what a person would type.
# GPUWARD_DEMO_PAUSE sets the seconds between two commands.
set -u
pause=${GPUWARD_DEMO_PAUSE:-1}
work=$(mktemp -d)
cd "$work" || exit 1
monitor=
trap 'kill $monitor 2>/dev/null; rm -rf "$work"' EXIT

bold= plain=
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi

say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }

# expect STATUS COMMAND: shows it as typed, runs it, and stops the tour where it ends otherwise.
expect() {
  wanted=$1; shift
  printf '$ %s\n' "$*"
  sh -c "$*" 2>&1
  got=$?
  if [ "$got" != "$wanted" ]; then
    printf 'the tour stops: exit status %s, not %s; the log of the daemon ends with\n' "$got" "$wanted"
    tail -n 20 "$GPUWARD_SIM_ROOT/run/gpuwardd.log"
    exit 1
  fi
  sleep "$pause"
}
run() { expect 0 "$@"; }
refused() { expect 3 "$@"; }

say "The host: eight H100s and four NVSwitches, all with the host's driver."
run gpuward list

say "What stands between this host and handing out its devices."
expect 0 gpuward doctor

say "One GPU is in use by the host. It is refused before anything is touched, with who holds it."
refused gpuward assign 0000:52:00.0

say "On another host, a GPU shares its IOMMU group with the disk of /var."
printf '$ gpuward assign 0000:01:00.0\n'
gpuward-sim crowded-group -- gpuward assign 0000:01:00.0 2>&1
[ $? = 3 ] || { echo "the tour stops: that was not refused"; exit 1; }
sleep "$pause"

say "What would be done for a free one; nothing is changed."
run gpuward plan assign 0000:1b:00.0

say "Events come as they happen: lines with a bar are what a second terminal shows."
printf '$ gpuward monitor | grep -v job\n'
mkfifo events
grep --line-buffered -v job <events | sed -u 's/^/  | /' &
gpuward monitor >events 2>&1 &
monitor=$!
sleep 1

say "Two GPUs go into the pool."
run gpuward assign 0000:1b:00.0
run gpuward assign 0000:43:00.0

say "A machine with two GPUs."
cat >train-1.toml <<'SPEC'
format = 1
name = "train-1"
vcpus = 16
memory = "64GiB"

[[disk]]
volume = "tank/train-1"

[[network]]
network = "default"

[[device]]
kind = "gpu"
count = 2
SPEC
run cat train-1.toml
run gpuward machine create train-1 -f train-1.toml
run gpuward machine start train-1
run gpuward list
run gpuward machine show train-1

say "It is killed: its GPUs are reset, checked and free again."
run gpuward machine kill train-1
run gpuward list

say "What befell one of them is kept, with each step of its reset."
run gpuward history 0000:1b:00.0

say "Another manager, which runs its own domains, claims one; libvirt's hook lets that domain have it and no other."
run gpuward claim make --gpu 1 --domain 1b4e28ba-2fa1-41d2-883f-0016d3cca427
run gpuward claims
run gpuward claim release "$(gpuward claims | awk 'NR == 2 { print $1 }')"

say "And back to the host, as before."
run gpuward release 0000:1b:00.0
run gpuward release 0000:43:00.0
run gpuward list
say "That was the tour. make demo SHELL=1 leaves you at a prompt on this host."
