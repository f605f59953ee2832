package service

import (
	"fmt"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// validate returns what is wrong with the domains, and the descriptor in which it is, or nil. The zones are
// checked elsewhere.
func (s *Service) validate() (in *Descriptor, err error) {
	if len(s.Domains) == 0 {
		return nil, option.Errorf(directive, "has no domain: add one, such as domain edge { descriptor remote_address zone per_ip } with a line for each descriptor, and that zone").
			Field("domains").JSONf(`is empty: add one, such as {"name": "edge", "descriptors": [{"key": "remote_address", "zone": "per_ip"}]}, and that zone`)
	}
	c := checking{zones: map[string]bool{}, domains: map[string]bool{}}
	for _, z := range s.Zones {
		if z != nil {
			c.zones[z.Name] = false
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
		if z != nil && !c.zones[z.Name] {
			return nil, option.In("zone "+z.Name, "zones", option.Errorf("descriptor", "leads to this zone nowhere: write descriptor <key> zone %s in a domain, or remove the zone", z.Name).
				Field(z.Name).JSONf("is the zone of no descriptor: add one to a domain, or remove the zone"))
		}
	}
	return nil, nil
}

// checking is what the check of domains has found so far.
type checking struct {
	// zones are those of the service, and whether a descriptor leads to them.
	zones   map[string]bool
	domains map[string]bool
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
	for _, leadsSo := range []bool{d.Zone != "", d.Unlimited, d.Denied} {
		if leadsSo {
			leads++
		}
	}
	_, isZone := c.zones[d.Zone]
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
	case d.Always && d.Zone == "":
		return option.Errorf("always", "goes with a zone: write zone <name> always, or remove it").JSONf("goes with zone only: add that, or remove it")
	case d.Zone != "" && !isZone:
		return option.Errorf("zone", "%s is not defined: add zone %[1]s { … } to the block of %s%s", d.Zone, directive, option.DidYouMean(d.Zone, keys(c.zones))).
			JSONf("%s is not defined: add it to zones%s", d.Zone, option.DidYouMean(d.Zone, keys(c.zones)))
	case d.Zone != "":
		c.zones[d.Zone] = true
	}
	return nil
}
