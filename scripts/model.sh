#!/bin/sh
# Checks model/charges.pml with Spin: all interleavings within the bounds of each line
# below, and that each rule left out on purpose violates the promise it is for. Prints
# states, depth and time. Checks as many lines at a time as there are processors: a sample of
# eight, all with SWEEP=all, or with arguments only the line that they form.
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# fail <message>: prints what Spin said, and ends; 255 ends xargs as well.
fail() {
	cat "$dir"/*.log
	echo "$1" >&2
	exit 255
}

# check <clean|part of an assertion> <macros>...: verifies the model with these macros.
check() {
	want=$1
	shift
	model=$PWD/model/charges.pml
	(cd "$dir" && spin -a "$@" "$model" >spin.log && cc -O2 -DSAFETY -DCOLLAPSE -DMEMLIM=4000 -o pan pan.c && ./pan -m100000 >pan.log) ||
		fail "Spin did not run"
	errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' "$dir/pan.log")
	depth=$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' "$dir/pan.log")
	states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' "$dir/pan.log")
	seconds=$(sed -n 's/^pan: elapsed time \([0-9.]*\) .*/\1/p' "$dir/pan.log")
	violated=$(sed -n 's/^pan:1: \(.*\) (at depth.*/: \1/p' "$dir/pan.log")
	echo "$*: $states states, depth $depth, ${seconds:-0} s, errors $errors$violated"
	if [ "$want" != clean ]; then
		case $violated in
		*"$want"*) return ;;
		esac
		fail "want a violation of $want"
	fi
	# A search that ran out of depth or memory proves nothing.
	if [ "$errors" != 0 ] || grep -q 'Search not completed\|max search depth too small' "$dir/pan.log"; then
		fail "want a $want model"
	fi
}

if [ $# -gt 0 ]; then
	check "$@"
	exit
fi

# Only a process that has more requests than the limit can exceed that.
one='-DLIMIT=1 -DREQUESTS=2 -DTICKS=1'
small='-DLIMIT=2 -DREQUESTS=2 -DTICKS=1'
three='-DLIMIT=2 -DREQUESTS=3 -DTICKS=0'
full='-DLIMIT=2 -DREQUESTS=3 -DTICKS=1'
# shellcheck disable=SC2086 # they are lists of macros
{
	echo clean $full
	for rule in HELD FLIGHT RAISE OVERLAP; do
		echo 'admitted<=' $full -DBREAK_$rule
	done

	for fault in FAILOVERS LOSSES CRASHES RESETS; do
		echo clean $one -D$fault=1
	done
	for fault in VANISHINGS FAILOVERS LOSSES CRASHES; do
		echo clean $small -D$fault=1
	done
	for fault in FAILOVERS LOSSES; do
		echo clean $three -D$fault=1
	done
	echo clean $small -DCUTS=1
	echo 'forgotten' $small -DBREAK_SETNX
	echo 'admitted<=' $one -DFAILOVERS=1 -DBREAK_SHORT
	echo 'count==' $small -DVANISHINGS=1 -DBREAK_ADOPTION
	echo 'excused' $small -DVANISHINGS=1 -DBREAK_MEND
	echo 'owed>=' $small -DVANISHINGS=1 -DBREAK_TWICE
	echo 'owed==0' $small -DFAILOVERS=1 -DBREAK_OVER
	echo 'owed>=' $small -DLOSSES=1 -DBREAK_REPEAT
	echo 'asksSuspecting' $small -DLOSSES=1 -DBREAK_DOUBT
	echo 'admitted<=' $one -DLOSSES=1 -DBREAK_LOOSE

	# The bucket expires at the second tick.
	expires='-DLIMIT=1 -DREQUESTS=2 -DTICKS=2 -DVANISHINGS=1'
	echo clean $expires
	echo 'forgotten' $expires -DBREAK_OPEN

	touch='-DLIMIT=2 -DREQUESTS=2 -DTICKS=0 -DVANISHINGS=1 -DCRASHES=1'
	echo clean $touch
	echo 'excused' $touch -DBREAK_TOUCH

	reset='-DLIMIT=2 -DREQUESTS=2 -DTICKS=0 -DRESETS=1'
	echo clean $reset
	for rule in REPLY ANSWER LAG; do
		echo 'asksSince' $reset -DBREAK_$rule
	done

	ages='-DLIMIT=3 -DREQUESTS=3 -DTICKS=0 -DAGES'
	echo clean $ages
	echo 'wrong<=1' $ages -DBREAK_USED
	echo 'shared' $ages -DBREAK_SOLE
} >"$dir/lines"
# A sample of both kinds, by the same variables as those of the tests (internal/sweep).
if [ "${SWEEP:-}" != all ]; then
	for kind in '' -v; do
		# Those without a rule end as soon as it is missed.
		n=5
		[ -n "$kind" ] || n=3
		grep $kind '^clean' "$dir/lines" | awk -v seed="${SWEEP_SEED:-1}" 'BEGIN { srand(seed) } { print rand() "\t" $0 }' | sort -n | head -n $n | cut -f 2-
	done >"$dir/sample"
	echo "$(wc -l <"$dir/sample") of $(wc -l <"$dir/lines") lines"
	mv "$dir/sample" "$dir/lines"
fi
xargs -L 1 -P "$(getconf _NPROCESSORS_ONLN)" scripts/model.sh <"$dir/lines"
