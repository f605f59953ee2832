#!/bin/sh
# Runs after the deb or the rpm is removed or upgraded. The user and its files stay.
set -e
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true
fi
