package service

import (
	"fmt"
	"slices"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// validate returns what is wrong with the domains, and the descriptor in which it is, or nil. The zones are
// checked elsewhere.
func (s *Service) validate() (in *Descriptor, err error) {
	if len(s.Domains) == 0 {
		return nil, option.Errorf(directive, "has no domain: add one, such as domain edge { descriptor remote_address zone per_ip } with a line for each descriptor, and that zone").
			Field("domains").JSONf(`is empty: add one, such as {"name": "edge", "descriptors": [{"key": "remote_address", "zone": "per_ip"}]}, and that zone`)
	}
	c := checking{zones: map[string]*checkedZone{}, domains: map[string]bool{}}
	for _, z := range s.Zones {
		if z != nil {
			c.zones[z.Name] = &checkedZone{Zone: z}
		}
	}
	for i, d := range s.Domains {
		path := fmt.Sprintf("domains[%d]", i)
		switch {
		case d == nil:
			return nil, option.Errorf("a domain", "is null: define or remove it").Field(path)
		case d.Name == "":
			return nil, option.Errorf("domain", "has no name: write domain <name>").Field(path + ".name").JSONf("is missing: add the name that calls give")
		case c.domains[d.Name]:
			return nil, option.Errorf("domain", "%s is defined twice: put the descriptors of both into one", d.Name).
				Field(path).JSONf("has the name of another domain, %s: put the descriptors of both into one", d.Name)
		}
		c.domains[d.Name] = true
		if in, err := c.descriptors(d.Descriptors, path); err != nil {
			return in, err
		}
	}
	for _, z := range s.Zones {
		if z != nil && !c.zones[z.Name].isUsed {
			return nil, option.In("zone "+z.Name, "zones", option.Errorf("descriptor", "leads to this zone nowhere: write descriptor <key> zone %s in a domain, or remove the zone", z.Name).
				Field(z.Name).JSONf("is the zone of no descriptor: add one to a domain, or remove the zone"))
		}
	}
	return nil, nil
}

// checking is what the check of domains has found so far.
type checking struct {
	zones   map[string]*checkedZone
	domains map[string]bool
}

// checkedZone is a zone of the service. isUsed is set if a descriptor leads to it.
type checkedZone struct {
	*shardlimit.Zone
	isUsed bool
}

// descriptors checks the descriptors at one place, which JSON has at the path.
func (c *checking) descriptors(all []*Descriptor, path string) (in *Descriptor, err error) {
	type entry struct{ key, value string }
	taken := map[entry]bool{}
	for i, d := range all {
		path := fmt.Sprintf("%s.descriptors[%d]", path, i)
		if d == nil {
			return nil, option.Errorf("a descriptor", "is null: define or remove it").Field(path)
		}
		if err := c.descriptor(d, taken[entry{d.Key, d.Value}]); err != nil {
			return d, option.In("descriptor "+d.Key, path, err)
		}
		taken[entry{d.Key, d.Value}] = true
		if in, err := c.descriptors(d.Descriptors, path); err != nil {
			return in, err
		}
	}
	return nil, nil
}

func (c *checking) descriptor(d *Descriptor, isTaken bool) error {
	leads := 0
	for _, leadsSo := range []bool{d.Zone != "", len(d.Zones) > 0, d.Unlimited, d.Denied} {
		if leadsSo {
			leads++
		}
	}
	names := d.names()
	switch {
	case d.Key == "":
		return option.Errorf("key", "is missing: write descriptor <key>").JSONf("is missing: add the key of the entry")
	case d.Value == "*":
		return option.Errorf("value", "* stands for any value: remove it, because a descriptor without a value takes any")
	case isTaken:
		return option.Errorf("value", "%q is there twice: remove one", d.Value).JSONf("%q is there twice with this key: remove one", d.Value)
	case leads > 1:
		return option.Errorf("zone", "and unlimited or denied exclude each other: write one").Field("zone")
	case leads == 0 && len(d.Descriptors) == 0:
		return option.Errorf("zone", "is missing: write zone <name>, unlimited or denied, or descriptors in a block").
			JSONf("is missing: add it, or unlimited, denied or descriptors")
	case d.Always && len(names) == 0:
		return option.Errorf("always", "goes with a zone: write zone <name> always, or remove it").JSONf("goes with zone only: add that, or remove it")
	case d.Postpaid && len(names) == 0:
		return option.Errorf("postpaid", "goes with a zone: write zone <name> postpaid, or remove it").JSONf("goes with zone only: add that, or remove it")
	case d.Always && d.Postpaid:
		return option.Errorf("postpaid", "and always exclude each other: write postpaid where the same descriptor looks and reports, and always for one that only reports")
	}
	for i, name := range names {
		z, isZone := c.zones[name]
		switch {
		case !isZone:
			return option.Errorf("zone", "%s is not defined: add zone %[1]s { … } to the block of %s%s", name, directive, option.DidYouMean(name, keys(c.zones))).
				JSONf("%s is not defined: add it to zones%s", name, option.DidYouMean(name, keys(c.zones)))
		case slices.Contains(names[:i], name):
			return option.Errorf("zone", "%s is there twice: remove one", name)
		case d.Postpaid:
			if err := z.checkPostpaid(); err != nil {
				return err
			}
		}
		z.isUsed = true
	}
	return nil
}

// names returns the names of the zones to which the descriptor leads.
func (d *Descriptor) names() []string {
	if d.Zone != "" {
		return []string{d.Zone}
	}
	return d.Zones
}

// checkPostpaid returns an error if what was used cannot be charged beyond the limit in the zone.
func (z *checkedZone) checkPostpaid() error {
	const remedy = "remove that, or write another zone"
	with := ""
	switch {
	case z.Algorithm == store.SlidingLog.String():
		with = "algorithm " + z.Algorithm + ", which keeps events one by one"
	case z.Batch != "":
		with = "batch, which takes ahead"
	case z.Penalty != 0:
		with = "penalty, which would punish for what was used already"
	default:
		return nil
	}
	return option.Errorf("postpaid", "does not go with the %s of zone %s: %s", with, z.Name, remedy)
}
