#!/bin/sh
# Installs what building and testing gpuward needs and is missing, on Debian or Ubuntu; does nothing where all is there.
set -eu
missing=
for package in build-essential pkg-config libvirt-dev libvirt-clients libxml2-utils dbus python3 python3-dbus systemd; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
as_root=; [ "$(id -u)" = 0 ] || as_root=sudo
echo "installing:$missing"
$as_root apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
