package redistest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// place is what a node of a cluster says of itself.
type place struct {
	node   *Server
	master string // the address of a replica's master; empty for a master
	slots  []slotRange
}

// slotRange is a range of slots, both ends included.
type slotRange struct {
	first, last int
}

// placeOf asks a node for its place.
func placeOf(ctx context.Context, node *Server) (place, error) {
	table, err := node.client.ClusterNodes(ctx).Result()
	if err != nil {
		return place{}, fmt.Errorf("ask node %s: %w", node.Addr(), err)
	}
	p := place{node: node}
	if err := p.read(table); err != nil {
		return place{}, fmt.Errorf("read the table of node %s: %w", node.Addr(), err)
	}
	return p, nil
}

// read finds the place in the reply of CLUSTER NODES. A line of it is
//
//	id ip:port@bus flags master ping pong epoch link [slots ...]
//
// where the master is an id or "-".
func (p *place) read(table string) error {
	addrs := make(map[string]string)
	var self []string
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if len(fields) < 8 {
			return fmt.Errorf("unknown line %q", line)
		}
		addrs[fields[0]], _, _ = strings.Cut(fields[1], "@")
		if slices.Contains(strings.Split(fields[2], ","), "myself") {
			self = fields
		}
	}
	if self == nil {
		return errors.New("no line is its own")
	}
	p.master = addrs[self[3]]
	for _, text := range self[8:] {
		// [slot->-id] and [slot-<-id] are slots on their way.
		if strings.HasPrefix(text, "[") {
			continue
		}
		r, err := parseSlots(text)
		if err != nil {
			return err
		}
		p.slots = append(p.slots, r)
	}
	return nil
}

// parseSlots reads "5" or "5-9".
func parseSlots(text string) (r slotRange, err error) {
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	if r.first, err = strconv.Atoi(first); err == nil {
		r.last, err = strconv.Atoi(last)
	}
	if err != nil {
		return r, fmt.Errorf("read slots %q: %w", text, err)
	}
	return r, nil
}

// owns tells whether the node regards itself as the master of a slot.
func (p place) owns(slot int) bool {
	return slices.ContainsFunc(p.slots, func(r slotRange) bool {
		return r.first <= slot && slot <= r.last
	})
}

// service is who serves a range of slots, as clients learn it.
type service struct {
	slots    slotRange
	master   string
	replicas string // their addresses, sorted, with commas
}

func newService(slots slotRange, master string, replicas []string) service {
	slices.Sort(replicas)
	return service{slots, master, strings.Join(replicas, ",")}
}

func sortServices(all []service) {
	slices.SortFunc(all, func(a, b service) int { return cmp.Compare(a.slots.first, b.slots.first) })
}

// servicesBy is what all clients should learn if what the nodes say of
// themselves is true. It fails unless every slot has one master, and every
// replica one of the masters.
func servicesBy(places []place) ([]service, error) {
	replicas := make(map[string][]string)
	for _, p := range places {
		if p.master != "" {
			replicas[p.master] = append(replicas[p.master], p.node.Addr())
		}
	}
	var all []service
	for _, p := range places {
		if p.master != "" {
			continue
		}
		for _, slots := range p.slots {
			all = append(all, newService(slots, p.node.Addr(), replicas[p.node.Addr()]))
		}
		delete(replicas, p.node.Addr())
	}
	for master, lost := range replicas {
		return nil, fmt.Errorf("%v replicate %s, which is no master", lost, master)
	}
	sortServices(all)
	next := 0
	for _, s := range all {
		if s.slots.first != next {
			return nil, fmt.Errorf("slot %d has not one master", min(next, s.slots.first))
		}
		next = s.slots.last + 1
	}
	if next != Slots {
		return nil, fmt.Errorf("slot %d has no master", next)
	}
	return all, nil
}

// servicesFrom is what clients learn from a node.
func servicesFrom(ctx context.Context, node *Server) ([]service, error) {
	reply, err := node.client.ClusterSlots(ctx).Result() //nolint:staticcheck // It is what clients ask.
	if err != nil {
		return nil, fmt.Errorf("ask node %s: %w", node.Addr(), err)
	}
	all := make([]service, 0, len(reply))
	for _, slots := range reply {
		var addrs []string
		for _, member := range slots.Nodes {
			addrs = append(addrs, member.Addr)
		}
		if len(addrs) == 0 {
			return nil, fmt.Errorf("node %s names nobody for slot %d", node.Addr(), slots.Start)
		}
		all = append(all, newService(slotRange{slots.Start, slots.End}, addrs[0], addrs[1:]))
	}
	sortServices(all)
	return all, nil
}
