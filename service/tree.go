package service

import (
	"cmp"
	"slices"
	"strings"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
)

// level has the entries that may come at one place of a descriptor, by key.
type level map[string]*values

// values are what the entries of one key lead to.
type values struct {
	exact map[string]*node
	// prefixes are of values that end with *, the longest first.
	prefixes []prefix
	// others is for any other value, or nil.
	others *node
}

type prefix struct {
	text string
	node *node
}

// node is where a descriptor is after an entry.
type node struct {
	*Descriptor
	// zones are the zones that the descriptor names.
	zones []*limiter.Zone
	below level
}

// compile makes the trees of valid domains.
func (s *Service) compile() {
	zones := map[string]*limiter.Zone{}
	for _, z := range s.limiter.Zones {
		zones[z.Name] = z
	}
	s.domains = map[string]level{}
	for _, d := range s.Domains {
		s.domains[d.Name] = compile(d.Descriptors, zones)
	}
}

func compile(descriptors []*Descriptor, zones map[string]*limiter.Zone) level {
	l := level{}
	for _, d := range descriptors {
		v := l[d.Key]
		if v == nil {
			v = &values{exact: map[string]*node{}}
			l[d.Key] = v
		}
		n := &node{Descriptor: d, below: compile(d.Descriptors, zones)}
		for _, name := range d.names() {
			n.zones = append(n.zones, zones[name])
		}
		switch text, isPrefix := strings.CutSuffix(d.Value, "*"); {
		case d.Value == "":
			v.others = n
		case isPrefix:
			v.prefixes = append(v.prefixes, prefix{text, n})
		default:
			v.exact[d.Value] = n
		}
	}
	for _, v := range l {
		slices.SortFunc(v.prefixes, func(a, b prefix) int { return cmp.Compare(len(b.text), len(a.text)) })
	}
	return l
}

// find returns the node to which the entries of a descriptor lead, or nil.
func (l level) find(entries []*commonv3.RateLimitDescriptor_Entry) (n *node) {
	for _, e := range entries {
		if n = l.match(e.GetKey(), e.GetValue()); n == nil {
			return nil
		}
		l = n.below
	}
	return n
}

func (l level) match(key, value string) *node {
	v := l[key]
	if v == nil {
		return nil
	}
	if n := v.exact[value]; n != nil {
		return n
	}
	for _, p := range v.prefixes {
		if strings.HasPrefix(value, p.text) {
			return p.node
		}
	}
	return v.others
}
