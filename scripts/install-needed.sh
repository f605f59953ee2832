#!/usr/bin/env bash
# Installs the programs named as arguments that are not there yet:
#
#   redis-server  the tests count in it        chromium  opens the page of `caddy rate-limit ui`
#   nginx         an example runs it           cc        a C compiler, for the race detector
#   spin          checks the model of charges       node, npm load HTTP clients and run them
#   make          runs the targets of Makefile      nutcracker, haproxy  proxies before Redis
#   php, python3  run backends behind the examples
#
# Without arguments: all of them. Knows Debian and its descendants; elsewhere it
# says what to install, and fails.
#
# Root installs Debian's packages. Others change nothing outside this checkout if they can: what
# works from a folder is unpacked, with its libraries, into bin/needed, which Makefile appends to
# the PATH. The rest is installed by sudo, after a question at the terminal; with CI=true
# without one.
#
# The services of nginx, nutcracker and haproxy are started neither now nor at the next
# boot, and no other is installed: the tests start servers of their own.
set -euo pipefail
unpacked=$(cd "${0%/*}/.." && pwd)/bin/needed
PATH=$PATH:$unpacked

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
	php) echo php-cli ;;
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
	python3) echo python ;;
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

# unpack PROGRAM... puts programs into bin/needed, with those of their libraries that the system
# lacks. It needs no root, and leaves out what does not run in the end.
unpack() {
	local work apt program package file libraries output
	work=$(mktemp -d)
	mkdir -p "$work"/{lists/partial,cache/archives/partial} "$unpacked"
	apt=(apt-get -qq -o Debug::NoLocking=1 -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=$(id -un)")
	cat >"$unpacked/fonts.conf" <<-FONTS
		<fontconfig><dir>$unpacked/files/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
	FONTS
	echo "- reading the lists of packages"
	"${apt[@]}" update || true # what cannot be downloaded is not unpacked
	for program in "$@"; do
		file=$(program_file "$program")
		echo "- unpacking $program"
		# --reinstall because the package of redis-server may be there without a program of that name.
		"${apt[@]}" -y --no-install-recommends --reinstall --download-only install "$(debian_packages "$program")" >/dev/null || continue
		for package in "$work"/cache/archives/*.deb; do dpkg -x "$package" "$unpacked/files"; done
		rm -f "$work"/cache/archives/*.deb
		if [ "$program" = redis-server ]; then ln -sf redis-check-rdb "$unpacked/files/$file"; fi
		libraries=$(find "$unpacked/files" -name 'lib*.so*' -path '*/lib/*-linux-gnu*' -printf '%h\n' | sort -u | paste -sd :)
		cat >"$unpacked/$program" <<-PROGRAM
			#!/bin/sh
			export LD_LIBRARY_PATH="$libraries" FONTCONFIG_FILE="$unpacked/fonts.conf"
			exec "$unpacked/files/$file" "\$@"
		PROGRAM
		chmod +x "$unpacked/$program"
		if ! output=$("$unpacked/$program" "$(version_option "$program")" 2>&1); then
			printf '  but it does not run there: %s\n' "$output"
			rm "$unpacked/$program"
		fi
	done
	rm -r "$work"
}

# program_file PROGRAM prints where its package has it, or nothing if it does not work from a folder.
program_file() {
	case $1 in
	redis-server | spin) echo "usr/bin/$1" ;;
	nginx | nutcracker | haproxy) echo "usr/sbin/$1" ;;
	chromium) echo usr/lib/chromium/chromium ;; # the one in usr/bin is a script that starts it
	esac
}

version_option() {
	case $1 in
	nginx | haproxy) echo -v ;;
	nutcracker | spin) echo -V ;;
	*) echo --version ;;
	esac
}

# find_missing PROGRAM... sets missing to those that are not there.
find_missing() {
	local program
	missing=()
	for program in "$@"; do
		is_there "$program" || missing+=("$program")
	done
}

if [ "${1:-}" = as-root ]; then
	shift
	install_packages "$@" </dev/null
	exit
fi

if [ $# -eq 0 ]; then set -- make redis-server nginx nutcracker haproxy chromium cc spin node npm php python3; fi
find_missing "$@"
if [ ${#missing[@]} -eq 0 ]; then exit; fi

if ! command -v apt-get >/dev/null; then
	echo "Please install what the tests need and is missing: ${missing[*]}" >&2
	if command -v brew >/dev/null || [ "$(uname)" = Darwin ]; then
		for program in "${missing[@]}"; do
			packages=$(homebrew_packages "$program")
			if [ -n "$packages" ]; then echo "  brew install $packages" >&2; else echo "  xcode-select --install" >&2; fi
		done
	else
		echo "There is no apt-get here. Homebrew's packages are redis, nginx, twemproxy, haproxy, spin, node, php, python, and the cask chromium." >&2
	fi
	exit 1
fi

if [ "$(id -u)" -ne 0 ]; then
	movable=()
	for program in "${missing[@]}"; do
		if [ -n "$(program_file "$program")" ]; then movable+=("$program"); fi
	done
	if [ ${#movable[@]} -gt 0 ]; then
		echo "Unpacking ${movable[*]} into $unpacked, from Debian's packages; the system stays as it is:"
		unpack "${movable[@]}"
		find_missing "$@"
		if [ ${#missing[@]} -eq 0 ]; then exit; fi
	fi
fi

packages=()
for program in "${missing[@]}"; do
	read -r -a some <<<"$(debian_packages "$program")"
	packages+=("${some[@]}")
done
if [ "$(id -u)" -eq 0 ]; then
	echo "Installing ${packages[*]} into the system with apt-get, which takes a minute or two:"
	"$0" as-root "${packages[@]}"
	exit
fi
if command -v sudo >/dev/null; then
	answer=no
	if [ "${CI:-}" = true ]; then
		answer=yes
	elif [ -t 0 ]; then
		read -r -p "Install ${packages[*]} into the system, with sudo and apt-get? [y/N] " answer || true
	fi
	case $answer in
	[Yy]*)
		sudo "$0" as-root "${packages[@]}"
		exit
		;;
	esac
fi
echo "The tests need ${missing[*]}. Please install it as root: apt-get install ${packages[*]}" >&2
exit 1
