#!/bin/sh
# Checks model/charges.pml with Spin: all interleavings within the bounds of each line
# below, and that each rule left out on purpose is found. Prints states and depth.
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# check <found|clean> <macros>...: verifies the model with these macros.
check() {
	want=$1
	shift
	model=$PWD/model/charges.pml
	(cd "$dir" && spin -a "$@" "$model" >spin.log && cc -O2 -DSAFETY -DCOLLAPSE -DMEMLIM=4000 -o pan pan.c && ./pan -m100000 >pan.log) ||
		{ cat "$dir"/*.log; exit 1; }
	errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' "$dir/pan.log")
	depth=$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' "$dir/pan.log")
	states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' "$dir/pan.log")
	echo "$*: $states states, depth $depth, errors $errors"
	# A search that ran out of depth or memory proves nothing.
	if grep -q 'Search not completed\|max search depth too small' "$dir/pan.log" && [ "$want" = clean ]; then
		cat "$dir/pan.log"
		exit 1
	fi
	case $want$errors in
	clean0 | found1) ;;
	*)
		cat "$dir/pan.log"
		echo "want a $want model" >&2
		exit 1
		;;
	esac
}

small='-DLIMIT=2 -DREQUESTS=2 -DTICKS=1'
full='-DLIMIT=2 -DREQUESTS=3 -DTICKS=1'
# shellcheck disable=SC2086 # they are lists of macros
{
	check clean $full
	for fault in VANISHINGS FAILOVERS LOSSES CRASHES; do
		check clean $small -D$fault=1
	done
	check clean -DLIMIT=1 -DREQUESTS=2 -DTICKS=2 -DVANISHINGS=1
	check clean -DLIMIT=1 -DREQUESTS=2 -DTICKS=1 -DRESETS=1

	reset='-DLIMIT=2 -DREQUESTS=2 -DTICKS=0 -DRESETS=1'
	check clean $reset
	for rule in REPLY ANSWER; do
		check found $reset -DBREAK_$rule
	done

	ages='-DLIMIT=3 -DREQUESTS=3 -DTICKS=0 -DAGES'
	check clean $ages
	check found $ages -DBREAK_USED
	for rule in HELD FLIGHT RAISE; do
		check found $full -DBREAK_$rule
	done
	check found $small -DBREAK_ADOPTION -DVANISHINGS=1
	check found $small -DBREAK_MEND -DVANISHINGS=1
	check found $small -DBREAK_REPEAT -DLOSSES=1
}
