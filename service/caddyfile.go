package service

import (
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// parseDirective parses the rate_limit_service directive:
//
//	rate_limit_service {
//		domain <name> {
//			descriptor <key> [<value>] zone <name>… [always|postpaid]|unlimited|denied
//			descriptor <key> [<value>] [zone <name>… [always|postpaid]|unlimited|denied] {
//				descriptor …
//			}
//		}
//		zone <name> {
//			…
//		}
//		…
//	}
//
// Zones, and the options below them, are those of rate_limit.
func parseDirective(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	s := new(Service)
	lines := places{}
	start := h.Token()
	if err := s.ParseService(h, s.rows(lines)...); err != nil {
		return nil, err
	}
	in, err := s.validate()
	switch {
	case err == nil:
		return s, nil
	case in != nil:
		start = lines[in]
	}
	return nil, option.ErrorAt(start, err)
}

// places are where a Caddyfile has the descriptors.
type places map[*Descriptor]caddyfile.Token

// rows are the options of the block that rate_limit does not have.
func (s *Service) rows(lines places) []option.Row {
	return []option.Row{{
		Name: "domain", JSON: []string{"domains"}, Args: "<name>", Repeats: true, Doc: "The name that calls give.",
		Block: []option.Row{
			{Name: "descriptor", JSON: []string{"descriptors"}, Args: "<key> [<value>] [zone <name>… [always|postpaid]|unlimited|denied]", Repeats: true, Doc: "The first entries of descriptors, and where they lead."},
		},
		Field: option.Field{Set: func(p *option.Parser) error {
			d := new(Domain)
			name, err := p.Arg()
			if err != nil {
				return err
			}
			d.Name = name
			d.Descriptors, err = lines.parse(p.Dispenser)
			s.Domains = append(s.Domains, d)
			return err
		}},
	}}
}

// parse parses the descriptors in the block of a domain or descriptor.
func (l places) parse(d *caddyfile.Dispenser) (all []*Descriptor, err error) {
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		at := d.Token()
		if d.Val() != "descriptor" {
			return nil, d.Errf("unknown option %s: there is only descriptor <key> [<value>] zone <name>… [always|postpaid]|unlimited|denied", d.Val())
		}
		one, err := parseDescriptor(d)
		if err != nil {
			return nil, err
		}
		l[one] = at
		if one.Descriptors, err = l.parse(d); err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

// parseDescriptor parses the arguments of one. A word in quotes is a key or value.
func parseDescriptor(d *caddyfile.Dispenser) (*Descriptor, error) {
	one := new(Descriptor)
	var texts []string
	isDone := false
	for !isDone && d.NextArg() {
		switch word := d.Val(); {
		case len(texts) == 0, d.Token().Quoted():
			texts = append(texts, word)
		case word == "zone" && d.NextArg():
			isDone = true
			for names := []string{d.Val()}; ; {
				switch isMore := d.NextArg(); {
				case isMore && d.Val() != "always" && d.Val() != "postpaid":
					names = append(names, d.Val())
					continue
				case isMore:
					one.Always, one.Postpaid = d.Val() == "always", d.Val() == "postpaid"
				}
				if one.Zone = names[0]; len(names) > 1 {
					one.Zone, one.Zones = "", names
				}
				break
			}
		case word == "unlimited":
			one.Unlimited, isDone = true, true
		case word == "denied":
			one.Denied, isDone = true, true
		default:
			texts = append(texts, word)
		}
	}
	if len(texts) < 1 || len(texts) > 2 || texts[0] == "" || texts[len(texts)-1] == "" || d.NextArg() {
		return nil, d.Err("descriptor takes a key, a value or none, and where it leads: write descriptor <key> [<value>] zone <name>… [always|postpaid]|unlimited|denied")
	}
	if one.Key = texts[0]; len(texts) > 1 {
		one.Value = texts[1]
	}
	return one, nil
}

func keys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
