#!/bin/sh
# Runs before the deb or the rpm is removed or upgraded: dpkg says "remove" or "upgrade",
# rpm how many versions remain.
set -e
case $1 in remove | 0) ;; *) exit 0 ;; esac
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
	systemctl disable --now caddy.service || true
fi
