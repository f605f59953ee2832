package endtoend

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// roundTrips are how far away Redis is made to be.
var roundTrips = []time.Duration{0, 100 * time.Microsecond, time.Millisecond, 5 * time.Millisecond}

// The names of cases of the sweep that are referred to.
const (
	sweepBase  = "base"
	twoShards  = "2 shards"
	manyKeys   = "many keys"
	fewerKeys  = "fewer keys"
	fourShards = "4 shards"
)

// limiting is a site with some zones that count the client of the header.
func (l *lab) limiting(name string, counting *redisStore, zones int, options string) *site {
	c := &site{name: name, status: 200, floor: floor, keys: l.opts.sweepKeys(), store: counting}
	var b strings.Builder
	b.WriteString("rate_limit {\n")
	if counting.name != "" {
		fmt.Fprintf(&b, "store %s\n", counting.name)
	}
	for i := range zones {
		// Zones with windows of one length would begin and end together.
		limit := &store.Limit{
			Zone:      strings.NewReplacer(" ", "_", ",", "").Replace(name) + "_" + strconv.Itoa(i),
			Algorithm: store.FixedWindow, Window: time.Duration(i+1) * time.Hour,
		}
		c.limits = append(c.limits, limit)
		fmt.Fprintf(&b, "zone %s {\nkey {header.X-Key}\nevents 50000000\nwindow %v\n%s\n}\n", limit.Zone, limit.Window, options)
	}
	b.WriteString("}\nrespond ok")
	c.text = b.String()
	return c
}

// sweepCases differ in one thing each from the base.
func (l *lab) sweepCases() []*site {
	s := &l.stores
	oneKey := l.limiting("1 key", &s.base, 1, "")
	oneKey.keys = 1
	someKeys := l.limiting(fewerKeys, &s.base, 1, "")
	someKeys.keys = l.opts.sweepKeys() / 3
	many := l.limiting(manyKeys, &s.many, 1, "")
	many.keys, many.isAlone = l.opts.manyKeys(), true
	cases := []*site{
		{name: floor, text: fiveHeaders + "respond ok", status: 200, keys: l.opts.sweepKeys(), store: &s.base},
		l.limiting(sweepBase, &s.base, 1, ""),
		l.limiting(twoShards, &s.two, 1, ""),
		l.limiting(fourShards, &s.four, 1, ""),
		l.limiting("no replica", &s.alone, 1, ""),
		l.limiting("2 replicas", &s.followed, 1, ""),
		l.limiting("3 zones", &s.base, 3, ""),
		oneKey,
		someKeys,
		many,
	}
	for i, far := range s.far {
		cases = append(cases, l.limiting(distanceName(roundTrips[i]), far, 1, ""))
	}
	return cases
}

// distanceName is that of a case whose Redis is so far away.
func distanceName(roundTrip time.Duration) string {
	if roundTrip == 0 {
		return "a relay between"
	}
	return fmt.Sprintf("%v ms away", float64(roundTrip)/float64(time.Millisecond))
}

// beforeName is that of the same with charge before.
func beforeName(roundTrip time.Duration) string { return distanceName(roundTrip) + ", charge before" }

// distanceCases are those of the sweep by distance, with charge before.
func (l *lab) distanceCases() (cases []*site) {
	for i, far := range l.stores.far {
		cases = append(cases, l.limiting(beforeName(roundTrips[i]), far, 1, "charge before"))
	}
	return cases
}
