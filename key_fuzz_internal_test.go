package shardlimit

import "testing"

// FuzzClientKey compares the client keys of two requests: they are equal
// exactly if the same text of the zone's key applies to both and all its
// placeholders yield the same.
func FuzzClientKey(f *testing.F) {
	f.Add("a", "b", "c", "192.0.2.1", "a", "b", "c", "192.0.2.1", 0, 0)
	f.Add("ab", "", "", "", "a", "b", "", "", 24, 64)
	f.Add("a:1", "b", "", "", "a", ":1b", "", "", 0, 0)
	f.Add("1:1", "", "", "", "1", ":1", "", "", 32, 128)
	f.Add("", "", "x", "192.0.2.1", "", "", "", "x", 0, 64)
	f.Add("", "", "192.0.2.1", "192.0.2.2", "", "", "", "192.0.2.1", 8, 0)
	f.Add("::ffff:192.0.2.1", "fe80::1%eth0", "", "::", "192.0.2.1", "fe80::1", "", "", 1, 1)
	names := []string{"a", "b", "c", ipVar}
	z := keyZone("{a}-{b}", "{a}{b}{c}")
	h, _ := keyHandler()
	f.Fuzz(func(t *testing.T, a1, b1, c1, ip1, a2, b2, c2, ip2 string, ipv4, ipv6 int) {
		one, other := []string{a1, b1, c1, ip1}, []string{a2, b2, c2, ip2}
		key := func(z *compiledZone, texts []string) string {
			v := values{}
			for i, name := range names {
				v[name] = texts[i]
			}
			return z.clientKey(v.replacer(), h)
		}
		key1, key2 := key(z, one), key(z, other)
		if same := identityOf(one) == identityOf(other); same != (key1 == key2) {
			t.Errorf("%q and %q have the keys %q and %q", one, other, key1, key2)
		}
		// Networks put addresses into one bucket, so only this holds.
		masked := keyZone(z.Key...)
		masked.IPv4Prefix, masked.IPv6Prefix = int(uint(ipv4)%33), int(uint(ipv6)%129)
		if key1 == key2 && key(masked, one) != key(masked, other) {
			t.Errorf("%q and %q differ only where networks are counted", one, other)
		}
		key(masked, other)
	})
}

// identityOf is what FuzzClientKey's zone has to tell clients apart by.
func identityOf(v []string) [4]string {
	switch {
	case v[0] != "" || v[1] != "":
		return [4]string{"first", v[0], v[1]}
	case v[2] != "":
		return [4]string{"second", v[2]}
	default:
		return [4]string{"client IP", v[3]}
	}
}
