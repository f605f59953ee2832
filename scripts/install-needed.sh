#!/usr/bin/env bash
# Installs what the tests and benchmarks need beside Go and is not there yet:
# make, redis-server, a C compiler for the race detector, promtool for the alert
# rules, nginx for an example, chromium for the page of `caddy rate-limit ui`, and
# wrk for a second opinion on speed. Knows Debian and its descendants.
#
# The services that come with the packages are neither started now nor at the
# next boot: the tests start servers of their own.
set -euo pipefail

wanted() {
	command -v make >/dev/null || echo make
	command -v redis-server >/dev/null || echo redis-server
	command -v promtool >/dev/null || echo prometheus
	[ -x /usr/sbin/nginx ] || command -v nginx >/dev/null || echo nginx
	command -v chromium >/dev/null || echo chromium
	command -v wrk >/dev/null || echo wrk
	local cc
	cc=$(go env CC)
	command -v "${cc%% *}" >/dev/null || echo gcc libc6-dev
}

# Denies every action on these services and leaves the others to the machine's
# own policy, which comes back when this script ends.
policy=/usr/sbin/policy-rc.d
saved=$policy.saved-by-shardlimit

restore_policy() {
	if grep -qs "$saved" "$policy"; then rm "$policy"; fi
	if [ -e "$saved" ]; then mv "$saved" "$policy"; fi
}

deny_services() {
	restore_policy # should an earlier run have been killed
	trap restore_policy EXIT
	trap 'exit 1' HUP INT TERM
	if [ -e "$policy" ]; then mv "$policy" "$saved"; fi
	cat >"$policy" <<-POLICY
		#!/bin/sh
		case "\$*" in *redis* | *prometheus* | *nginx*) exit 101 ;; esac
		[ ! -x $saved ] || exec $saved "\$@"
	POLICY
	chmod 755 "$policy"
}

install() {
	export DEBIAN_FRONTEND=noninteractive
	deny_services
	apt-get -q -o DPkg::Lock::Timeout=300 update
	apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"
	local package
	for package in "$@"; do
		case $package in
		redis-server | prometheus | nginx) update-rc.d "$package" disable ;;
		esac
	done
}

if [ "${1:-}" = install ]; then # as root
	shift
	install "$@" </dev/null
	exit
fi

packages=$(wanted)
if [ -z "$packages" ]; then exit; fi
read -r -d '' -a packages <<<"$packages" || true
echo "installing: ${packages[*]}"
if ! command -v apt-get >/dev/null; then
	echo "no apt-get here; please install: ${packages[*]}" >&2
	exit 1
fi
if [ "$(id -u)" -eq 0 ]; then
	"$0" install "${packages[@]}"
elif command -v sudo >/dev/null; then
	sudo "$0" install "${packages[@]}"
else
	echo "neither root nor sudo; please install: ${packages[*]}" >&2
	exit 1
fi
