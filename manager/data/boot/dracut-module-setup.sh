#!/bin/bash
# Of dracut: copies what owns which function into the initramfs, and has it kept before udev starts.

check() {
  [[ -r /var/lib/gpuward/pins ]]
}

install() {
  inst_multiple mkdir
  inst_script /usr/lib/gpuward/pin /usr/lib/gpuward/pin
  inst_simple /var/lib/gpuward/pins /etc/gpuward/pins
  inst_hook pre-udev 05 "$moddir/gpuward-pin.sh"
}
