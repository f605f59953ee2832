#!/usr/bin/env bash
# Unpacks the servers of the family that the tests run with, beside Debian's redis-server 7.0, into
# bin/servers: valkey-server-8.0, valkey-server-8.1, valkey-server-9.1 and redis-server-8.0. They
# come from other suites of Debian, with their own libraries; nothing is installed. A server that is
# there stays as it is. Needs apt-get and Debian's keys, on x86-64.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/bin/servers

missing() { [ ! -x "$root/$1" ]; }
if ! missing valkey-server-8.0 && ! missing valkey-server-8.1 && ! missing valkey-server-9.1 && ! missing redis-server-8.0; then exit; fi
if ! command -v apt-get >/dev/null || [ "$(uname -m)" != x86_64 ]; then
	echo "The servers come from Debian's packages for x86-64. Elsewhere, build them, and name one by REDISTEST_SERVER." >&2
	exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$root" "$work"/{sources,lists/partial,cache/archives/partial,debs}
mirror=$(grep -hE '^(URIs:|deb )' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -oE 'https?://[^ ]+' | grep -m1 debian || echo http://deb.debian.org/debian)
for suite in bookworm-backports trixie sid; do
	printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
		"${mirror%/}" "$suite" >"$work/sources/$suite.sources"
done
apt=(apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources" -o "Dir::State::Lists=$work/lists"
	-o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update

# unpack SUITE FOLDER PACKAGE... puts packages of a suite into a folder.
unpack() {
	local suite=$1 folder=$root/$2 package
	shift 2
	mkdir -p "$folder"
	(cd "$work/debs" && "${apt[@]}" download "${@/%//$suite}")
	for package in "$work"/debs/*.deb; do dpkg -x "$package" "$folder"; done
	rm "$work"/debs/*.deb
}

# server SUITE NAME PACKAGE... unpacks a server, whose program is called like its first package.
server() {
	local suite=$1 name=$2 program=$3
	shift 2
	missing "$name" || return 0
	unpack "$suite" "files/$name" "$@"
	cat >"$root/$name" <<-PROGRAM
		#!/bin/sh
		exec "$root/files/libraries/usr/lib64/ld-linux-x86-64.so.2" --library-path "$root/files/libraries/usr/lib/x86_64-linux-gnu" "$root/files/$name/usr/bin/$program" "\$@"
	PROGRAM
	chmod +x "$root/$name"
	"$root/$name" --version
}

# The program of a server is in the package of its tools.
unpack trixie files/libraries libc6 libjemalloc2 liblzf1 libssl3t64 libsystemd0 libatomic1 libstdc++6 libgcc-s1 \
	libcap2 libzstd1 zlib1g libgcrypt20 libgpg-error0 liblz4-1 liblzma5
server trixie redis-server-8.0 redis-server redis-tools
server trixie valkey-server-8.1 valkey-server valkey-tools
server sid valkey-server-9.1 valkey-server valkey-tools
server bookworm-backports valkey-server-8.0 valkey-server valkey-tools
