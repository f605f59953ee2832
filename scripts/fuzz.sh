#!/usr/bin/env bash
# Runs every fuzz target of the module for FUZZTIME (default 10s), one after
# the other, and prints a line for each; a failing one also prints its output.
# With UNGUIDED=1 they run without coverage, but with the race detector: to instrument all of Caddy
# takes minutes, which a few seconds of fuzzing do not repay. Arguments are packages, default ./...
set -euo pipefail
cd "$(dirname "$0")/.."
fuzztime=${FUZZTIME:-10s}
if [ $# -eq 0 ]; then set -- ./...; fi

dir=$(mktemp -d)
log=$dir/log
trap 'rm -rf "$dir"' EXIT

# Until Go 1.27 a run can end with nothing but "context deadline exceeded" when
# its time is over (https://go.dev/issue/75804); that is no finding.
only_out_of_time() {
	grep -qx '    context deadline exceeded' "$log" &&
		! grep -qE 'Failing input|panic:|testing\.go|_test\.go' "$log"
}

# fuzz <package> <target>
fuzz() {
	if [ "${UNGUIDED:-}" != 1 ]; then
		go test -vet=off -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" "./$1"
		return
	fi
	local test=$dir/${1//\//_}.test
	# The flags are those of the tests, so that builds are shared with them.
	if [ ! -e "$test" ]; then CGO_ENABLED=1 go test -race -ldflags=-w -c -o "$test" "./$1"; fi &&
		(cd "$1" && "$test" -test.run '^$' -test.fuzz "^$2\$" -test.fuzztime "$fuzztime" -test.fuzzcachedir "$dir/cache")
}

failed=0 count=0
while IFS=: read -r file line; do
	package=$(dirname "$file") name=${line#func }
	name=${name%%(*}
	count=$((count + 1))
	printf '%s %s: ' "$package" "$name"
	if fuzz "$package" "$name" >"$log" 2>&1 || only_out_of_time; then
		grep -o 'execs: [0-9]*' "$log" | tail -1 || echo ok
	else
		failed=1
		echo FAIL
		cat "$log"
	fi
done < <(grep '^func Fuzz' $(go list -f '{{$dir := .Dir}}{{range .TestGoFiles}}{{$dir}}/{{.}} {{end}}{{range .XTestGoFiles}}{{$dir}}/{{.}} {{end}}' "$@") | sed "s|^$PWD/||" | sort)

echo "fuzz targets: $count, $fuzztime each"
exit $((failed || count == 0))
