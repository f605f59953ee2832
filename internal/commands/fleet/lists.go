package fleet

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

// defaultListed is how many clients a list has if the request does not say.
const defaultListed = 20

// listed is how many clients a list has.
func (a *asked) listed() int {
	if n, err := strconv.Atoi(a.query.Get("n")); err == nil && n > 0 {
		return n
	}
	return defaultListed
}

// clientID identifies a client of a zone. Of a store that is not shared, each Caddy has its own.
type clientID struct{ store, key, address string }

func (a *asked) idOf(store, key, address string) clientID {
	if a.areShared(store) {
		address = ""
	}
	return clientID{store, key, address}
}

// clientOf returns the description of a client key by a Caddy whose config knows the key.
func clientOf(a, b adminapi.Client) adminapi.Client {
	if a.Unknown {
		return b
	}
	return a
}

// mergeTop adds up the refusals of each client, wherever it counts.
func mergeTop(parts []part[adminapi.Top], a asked) adminapi.Top {
	merged, clients := adminapi.Top{Unanswered: a.unanswered()}, joined[clientID, adminapi.RefusedClient]{}
	for _, p := range parts {
		merged.Zone, merged.Since = p.answer.Zone, max(merged.Since, p.answer.Since)
		for _, c := range p.answer.Refused {
			into, isNew := clients.at(clientID{store: c.Store, key: c.ClientKey}, c)
			if into.Client = clientOf(into.Client, c.Client); !isNew {
				into.Count, into.LastRefused = into.Count+c.Count, max(into.LastRefused, c.LastRefused)
			}
			into.Shares = append(into.Shares, adminapi.ClientShare{Address: p.address, Count: c.Count})
		}
	}
	slices.SortFunc(clients.all, func(a, b adminapi.RefusedClient) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.ClientKey, b.ClientKey))
	})
	merged.Refused = append([]adminapi.RefusedClient{}, clients.all[:min(a.listed(), len(clients.all))]...)
	return merged
}

func mergeTops(parts []part[adminapi.Tops], a asked) adminapi.Tops {
	of := func(t adminapi.Tops) []adminapi.Top { return t.Zones }
	name := func(t adminapi.Top) string { return t.Zone }
	return adminapi.Tops{Zones: eachZone(parts, of, name, mergeTop, a), Unanswered: a.unanswered()}
}

// mergeNear joins the clients that are near their limit: of a shared store what the Caddy knows that
// knows most, and what each has seen.
func mergeNear(parts []part[adminapi.Near], a asked) adminapi.Near {
	merged, clients := adminapi.Near{Percent: 100, Unanswered: a.unanswered()}, joined[clientID, adminapi.NearClient]{}
	for _, p := range parts {
		merged.Zone, merged.Percent = p.answer.Zone, min(merged.Percent, p.answer.Percent)
		if a.areShared(a.storesOf(p.answer.Zone, true)...) {
			// They know of the same ones.
			merged.Full = max(merged.Full, p.answer.Full)
		} else {
			merged.Full += p.answer.Full
		}
		merged.Unlisted = append(merged.Unlisted, p.answer.Unlisted...)
		for _, c := range p.answer.Clients {
			id := a.idOf(c.Store, c.ClientKey, p.address)
			c.Address = id.address
			into, isNew := clients.at(id, c)
			seen, client := into.Seen, clientOf(into.Client, c.Client)
			if !isNew && c.Used > into.Used {
				*into = c
			}
			into.Client = client
			if id.address == "" {
				into.Seen = append(seen, adminapi.Sighting{Address: p.address, Used: c.Used})
			}
		}
	}
	slices.Sort(merged.Unlisted)
	merged.Unlisted = slices.Compact(merged.Unlisted)
	share := func(c adminapi.NearClient) float64 { return float64(c.Used) / float64(c.Limit) }
	slices.SortStableFunc(clients.all, func(a, b adminapi.NearClient) int {
		return cmp.Or(cmp.Compare(share(b), share(a)), strings.Compare(a.ClientKey, b.ClientKey))
	})
	merged.Clients = append([]adminapi.NearClient{}, clients.all[:min(a.listed(), len(clients.all))]...)
	return merged
}

func mergeNears(parts []part[adminapi.Nears], a asked) adminapi.Nears {
	of := func(n adminapi.Nears) []adminapi.Near { return n.Zones }
	name := func(n adminapi.Near) string { return n.Zone }
	return adminapi.Nears{Zones: eachZone(parts, of, name, mergeNear, a), Unanswered: a.unanswered()}
}

// eachZone merges what answers say of each zone, in alphabetical order.
func eachZone[T, Z any](parts []part[T], of func(T) []Z, name func(Z) string, merge func([]part[Z], asked) Z, a asked) []Z {
	zones := joined[string, []part[Z]]{}
	for _, p := range parts {
		for _, z := range of(p.answer) {
			into, _ := zones.at(name(z), nil)
			*into = append(*into, part[Z]{p.address, z})
		}
	}
	a.failed = nil // said of the whole
	all := []Z{}
	for _, z := range zones.all {
		all = append(all, merge(z, a))
	}
	slices.SortFunc(all, func(a, b Z) int { return strings.Compare(name(a), name(b)) })
	return all
}

// mergeHistory adds up series, of the steps that all Caddys have: their clocks, and the instants at which
// they answer, may differ by a step. What no Caddy knows is unknown.
func mergeHistory(parts []part[adminapi.History], a asked) adminapi.History {
	merged, end := adminapi.History{Unanswered: a.unanswered()}, int64(math.MaxInt64)
	for _, p := range parts {
		merged.Range, merged.Step, merged.Start = p.answer.Range, p.answer.Step, max(merged.Start, p.answer.Start)
		end = min(end, endOf(&p.answer))
	}
	// The last step is as long as for the Caddy that knows most of it. For one with a later step it is over.
	isOver := false
	for _, p := range parts {
		switch itsEnd := endOf(&p.answer); {
		case itsEnd == math.MaxInt64:
		case itsEnd > end || p.answer.Partial == 0:
			isOver = true
		default:
			merged.Partial = max(merged.Partial, p.answer.Partial)
		}
	}
	if isOver {
		merged.Partial = 0
	}
	steps := int(max(0, end-merged.Start) / max(merged.Step, 1))
	zones := joined[string, adminapi.ZoneHistory]{}
	for _, p := range parts {
		late := int((merged.Start - p.answer.Start) / max(merged.Step, 1))
		for i := range p.answer.Zones {
			z := p.answer.Zones[i]
			into, _ := zones.at(z.Zone, adminapi.ZoneHistory{Zone: z.Zone})
			into.StoreLatency = addLatencies(into, &z, late, steps)
			for _, s := range []struct {
				to   *adminapi.Series
				from adminapi.Series
			}{
				{&into.Allowed, z.Allowed}, {&into.WouldRefuse, z.WouldRefuse}, {&into.Refused, z.Refused},
				{&into.Unchecked, z.Unchecked}, {&into.Waited, z.Waited}, {&into.StoreCalls, z.StoreCalls},
			} {
				*s.to = joinSeries(*s.to, s.from, late, steps, func(_ int, x, y float64) float64 { return x + y })
			}
		}
	}
	merged.Zones = append([]adminapi.ZoneHistory{}, zones.all...)
	slices.SortFunc(merged.Zones, func(a, b adminapi.ZoneHistory) int { return strings.Compare(a.Zone, b.Zone) })
	return merged
}

// endOf returns when the last step of a history ends, or the largest number if it has none.
func endOf(h *adminapi.History) int64 {
	if len(h.Zones) == 0 {
		return math.MaxInt64
	}
	return h.Start + h.Step*int64(len(h.Zones[0].StoreCalls))
}

// joinSeries joins the first steps of two series, of which the second begins some steps before. Where one
// is unknown, the other counts; beyond the end of one as well.
func joinSeries(a, b adminapi.Series, late, steps int, join func(i int, x, y float64) float64) adminapi.Series {
	b = b[min(late, len(b)):]
	all := make(adminapi.Series, min(steps, max(len(a), len(b))))
	at := func(s adminapi.Series, i int) float64 {
		if i < len(s) {
			return s[i]
		}
		return math.NaN()
	}
	for i := range all {
		x, y := at(a, i), at(b, i)
		switch {
		case math.IsNaN(x):
			all[i] = y
		case math.IsNaN(y):
			all[i] = x
		default:
			all[i] = join(i, x, y)
		}
	}
	return all
}

// addLatencies returns the mean latency of the calls of two Caddys. The calls of a are not added yet.
func addLatencies(a, b *adminapi.ZoneHistory, late, steps int) adminapi.Series {
	return joinSeries(a.StoreLatency, b.StoreLatency, late, steps, func(i int, x, y float64) float64 {
		n, m := a.StoreCalls[i], b.StoreCalls[i+late]
		return math.Round((x*n+y*m)/(n+m)*1e6) / 1e6
	})
}
