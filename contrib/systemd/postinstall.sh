#!/bin/sh
# Runs after the deb or the rpm is installed or upgraded. A Caddy that runs is restarted
# with the new program; nothing is started that did not run.
set -e
systemd-sysusers ${DPKG_ROOT:+--root="$DPKG_ROOT"} caddy.conf
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
	# Debian's package caddy masks the unit when it is removed.
	if command -v deb-systemd-helper >/dev/null; then deb-systemd-helper unmask caddy.service >/dev/null || true; fi
	systemctl daemon-reload || true
	# A config that does not load is no reason to leave the package half installed.
	systemctl try-restart caddy.service || echo "caddy.service did not restart: see journalctl -u caddy" >&2
fi
