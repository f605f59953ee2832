package admin

import (
	"errors"
	"net/http"
	"net/url"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func TestServerOfAURL(t *testing.T) {
	one := map[string][]string{"only": {":8080"}}
	several := map[string][]string{
		"public": {"203.0.113.7:443", "203.0.113.7:80"}, "inner": {"127.0.0.1:8443"}, "range": {"tcp/:9000-9009"}, "socket": {"unix//run/caddy.sock"},
	}
	const mapped = ": if something in front of Caddy maps addresses, name the server (--server, in JSON server)"
	for _, test := range []struct {
		listen            map[string][]string
		url, name, server string
		want              string
	}{
		{listen: one, url: "http://127.0.0.1:8080/", server: "only"},
		{listen: one, url: "http://[::1]:8080/", server: "only"},
		{listen: one, url: "https://example.com/", server: "only"},
		{listen: one, url: "/", server: "only"},
		{listen: one, url: "http://127.0.0.1:9999/", want: "no server listens at 127.0.0.1:9999; there is only at :8080" + mapped},
		{listen: one, url: "http://127.0.0.1:9999/", name: "only", server: "only"},
		{listen: several, url: "https://203.0.113.7/", server: "public"},
		{listen: several, url: "https://example.com/", server: "public"},
		{listen: several, url: "https://[::ffff:127.0.0.1]:8443/", server: "inner"},
		{listen: several, url: "http://10.0.0.1:9004/", server: "range"},
		{listen: several, url: "https://10.0.0.1:8443/", want: "no server listens at 10.0.0.1:8443; there is inner at 127.0.0.1:8443, public at 203.0.113.7:443 and 203.0.113.7:80, range at tcp/:9000-9009, socket at unix//run/caddy.sock" + mapped},
		{listen: several, url: "http://127.0.0.1/", want: "no server listens at 127.0.0.1:80; there is inner at 127.0.0.1:8443, public at 203.0.113.7:443 and 203.0.113.7:80, range at tcp/:9000-9009, socket at unix//run/caddy.sock" + mapped},
	} {
		app := &caddyhttp.App{Servers: map[string]*caddyhttp.Server{}}
		for name, listen := range test.listen {
			app.Servers[name] = &caddyhttp.Server{Listen: listen}
		}
		target, err := url.Parse(test.url)
		if err != nil {
			t.Fatal(err)
		}
		server, err := serverFor(app, test.name, target)
		if test.want == "" {
			if err != nil || server != app.Servers[test.server] {
				t.Errorf("%s: %v, %v, want server %s", test.url, server, err, test.server)
			}
			continue
		}
		if refusal := new(caddy.APIError); !errors.As(err, refusal) || refusal.HTTPStatus != http.StatusNotFound || refusal.Err.Error() != test.want {
			t.Errorf("%s: %v, want %s", test.url, err, test.want)
		}
	}
}
