#!/bin/sh
# Sourced by dracut: it must not end the shell.
/usr/lib/gpuward/pin
