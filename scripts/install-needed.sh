#!/usr/bin/env bash
# Installs the programs named as arguments that are not there yet:
#
#   redis-server  the tests count in it        chromium  opens the page of `caddy rate-limit ui`
#   nginx         an example runs it           cc        a C compiler, for the race detector
#   spin          checks the model of charges       node, npm load HTTP clients and run them
#   make          runs the targets of Makefile      nutcracker, haproxy  proxies before Redis
#
# Without arguments: all of them. Knows Debian and its descendants; elsewhere it
# says what to install, and fails.
#
# The services of nginx, nutcracker and haproxy are started neither now nor at the next
# boot, and no other is installed: the tests start servers of their own.
set -euo pipefail

# is_there PROGRAM reports whether a program is installed.
is_there() {
	local cc
	case $1 in
	nginx | nutcracker | haproxy) [ -x "/usr/sbin/$1" ] || command -v "$1" >/dev/null ;;
	chromium) command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
		[ -x /Applications/Chromium.app/Contents/MacOS/Chromium ] ;;
	cc)
		cc=$(go env CC)
		command -v "${cc%% *}" >/dev/null
		;;
	*) command -v "$1" >/dev/null ;;
	esac
}

debian_packages() {
	case $1 in
	redis-server) echo redis-tools ;; # has the program; the package redis-server adds a service and a link
	cc) echo gcc libc6-dev ;;
	node) echo nodejs ;;
	*) echo "$1" ;;
	esac
}

homebrew_packages() {
	case $1 in
	redis-server) echo redis ;;
	chromium) echo --cask chromium ;;
	nutcracker) echo twemproxy ;;
	cc) ;;
	npm) ;; # comes with node
	*) echo "$1" ;;
	esac
}

# Where the packages are installed; a test has a folder here.
root=${INSTALL_ROOT:-}

# Denies every action on the services that come with what is installed and leaves the
# others to the machine's own policy, which comes back when this script ends.
policy=$root/usr/sbin/policy-rc.d
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
		case "\$*" in *nginx* | *nutcracker* | *haproxy*) exit 101 ;; esac
		[ ! -x $saved ] || exec $saved "\$@"
	POLICY
	chmod 755 "$policy"
}

install_packages() {
	export DEBIAN_FRONTEND=noninteractive
	deny_services
	echo "- reading the lists of packages"
	apt-get -qq -o DPkg::Lock::Timeout=300 update
	local package left
	for package in "$@"; do
		echo "- installing $package"
		apt-get -qq -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 install --no-install-recommends "$package" >/dev/null
		case $package in
		redis-tools) # the server and this check are one program, which looks at its name
			mkdir -p "$root/usr/local/bin"
			ln -sf ../../bin/redis-check-rdb "$root/usr/local/bin/redis-server"
			"$root/usr/local/bin/redis-server" --version >/dev/null
			;;
		nginx | nutcracker | haproxy)
			update-rc.d "$package" disable >/dev/null
			left=$(find "$root"/etc/rc?.d "$root/etc/systemd/system" -name "S??$package" -o -name "$package.service") || true
			if [ -n "$left" ]; then
				printf '%s would start with the machine:\n%s\n' "$package" "$left" >&2
				exit 1
			fi
			;;
		esac
	done
	echo "- installed; no service was started"
}

if [ "${1:-}" = as-root ]; then
	shift
	install_packages "$@" </dev/null
	exit
fi

if [ $# -eq 0 ]; then set -- make redis-server nginx nutcracker haproxy chromium cc spin node npm; fi
missing=()
for program in "$@"; do
	is_there "$program" || missing+=("$program")
done
if [ ${#missing[@]} -eq 0 ]; then exit; fi

if ! command -v apt-get >/dev/null; then
	echo "Please install what the tests need and is missing: ${missing[*]}" >&2
	if command -v brew >/dev/null || [ "$(uname)" = Darwin ]; then
		for program in "${missing[@]}"; do
			packages=$(homebrew_packages "$program")
			if [ -n "$packages" ]; then echo "  brew install $packages" >&2; else echo "  xcode-select --install" >&2; fi
		done
	else
		echo "There is no apt-get here. Homebrew's packages are redis, nginx, twemproxy, haproxy, spin, node, and the cask chromium." >&2
	fi
	exit 1
fi

packages=()
for program in "${missing[@]}"; do
	read -r -a some <<<"$(debian_packages "$program")"
	packages+=("${some[@]}")
done
echo "Installing ${packages[*]} with apt-get, which takes a minute or two:"
if [ "$(id -u)" -eq 0 ]; then
	"$0" as-root "${packages[@]}"
elif command -v sudo >/dev/null; then
	sudo "$0" as-root "${packages[@]}"
else
	echo "This needs root, or sudo. Please run as root: apt-get install ${packages[*]}" >&2
	exit 1
fi
