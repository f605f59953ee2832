package shardlimit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// definition is what zones of one name must agree on, as options that differ
// from the default.
func (z *Zone) definition() string {
	var b strings.Builder
	b.WriteString("key")
	for _, text := range z.Key {
		if strings.ContainsAny(text, " \t\n\"`") {
			text = strconv.Quote(text)
		}
		b.WriteString(" " + text)
	}
	add := func(different bool, format string, args ...any) {
		if different {
			fmt.Fprintf(&b, ", "+format, args...)
		}
	}
	if add(true, "events %s", z.Events.canonical()); z.EventsFallback != 0 {
		fmt.Fprintf(&b, " %d", z.EventsFallback)
	}
	window := time.Duration(z.Window)
	if z.isLease() && window == defaultLease {
		window = 0
	}
	add(window != 0, "window %s", window)
	add(z.Algorithm != "" && z.Algorithm != "fixed_window", "algorithm %s", z.Algorithm)
	add(z.Align, "align")
	add(z.Burst != 0 && strconv.FormatInt(z.Burst, 10) != z.Events.canonical(), "burst %d", z.Burst)
	add(z.Cost != "" && z.Cost.canonical() != "1", "cost %s", z.Cost.canonical())
	add(z.Charge == chargeBefore && !z.isLease(), "charge %s", z.Charge)
	batch, _ := z.Batch.parse()
	add(batch != 0, "batch %s", Amount(z.Batch).canonical())
	add(z.BatchShare != 0 && z.BatchShare != defaultBatchShare, "batch_share %d", z.BatchShare)
	free := sortedStatuses(z.FreeStatus)
	add(free != "" && free != "304", "free_status %s", free)
	add(len(z.CountStatus) > 0, "count_status %s", sortedStatuses(z.CountStatus))
	add(z.MaxWait != 0, "max_wait %s", time.Duration(z.MaxWait))
	add(z.MaxWaitQueue != 0 && z.MaxWaitQueue != defaultMaxWaitQueue, "max_wait_queue %d", z.MaxWaitQueue)
	add(z.Penalty != 0, "penalty %s", time.Duration(z.Penalty))
	for _, reserve := range z.Reserves {
		add(true, "reserve %d", reserve.Percent)
	}
	add(z.IPv4Prefix != 0, "ipv4_prefix %d", z.IPv4Prefix)
	add(z.IPv6Prefix != 0, "ipv6_prefix %d", z.IPv6Prefix)
	add(z.OnError != "", "on_error %s", z.OnError)
	return b.String()
}

func sortedStatuses(l StatusList) string {
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(l))), " ")
}
