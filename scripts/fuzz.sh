#!/usr/bin/env bash
# Runs every fuzz target of the module for FUZZTIME (default 10s), one after
# the other, and prints a line for each; a failing one also prints its output.
# Arguments are packages, default ./...
set -euo pipefail
cd "$(dirname "$0")/.."
fuzztime=${FUZZTIME:-10s}
if [ $# -eq 0 ]; then set -- ./...; fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Until Go 1.27 a run can end with nothing but "context deadline exceeded" when
# its time is over (https://go.dev/issue/75804); that is no finding.
only_out_of_time() {
	grep -qx '    context deadline exceeded' "$log" &&
		! grep -qE 'Failing input|panic:|testing\.go|_test\.go' "$log"
}

# go test -list prints the targets of a package and then "ok <package> <time>".
# The flags are those of the tests, so that builds are shared with them.
list=$(go test -race -vet=off -list '^Fuzz' "$@") || {
	echo "$list"
	exit 1
}

names=() failed=0 count=0
while read -r word package _; do
	case $word in
	Fuzz*) names+=("$word") ;;
	ok)
		for name in "${names[@]}"; do
			count=$((count + 1))
			printf '%s %s: ' "$package" "$name"
			if go test -vet=off -run '^$' -fuzz "^$name\$" -fuzztime "$fuzztime" "$package" >"$log" 2>&1 || only_out_of_time; then
				grep -o 'execs: [0-9]*' "$log" | tail -1 || echo ok
			else
				failed=1
				echo FAIL
				cat "$log"
			fi
		done
		names=()
		;;
	esac
done <<<"$list"

echo "fuzz targets: $count, $fuzztime each"
exit $failed
