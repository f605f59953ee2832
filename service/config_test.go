package service_test

import (
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

func adapt(block string) ([]byte, error) {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(":8080 {\n"+block+"\n}\n"), nil)
	return config, err
}

const (
	ip    = "\tzone ip {\n\t\tevents 5\n\t\twindow 1m\n"
	plain = "rate_limit_service {\n\tdomain edge {\n\t\tdescriptor ip zone ip\n\t}\n" + ip + "\t}\n"
)

// TestCaddyfileErrors name the line, and what to do.
func TestCaddyfileErrors(t *testing.T) {
	domain := func(lines string) string {
		return "rate_limit_service {\n\tdomain edge {\n" + lines + "\n\t}\n" + ip + "\t}\n}"
	}
	zone := func(line string) string {
		return "rate_limit_service {\n\tdomain edge {\n\t\tdescriptor ip zone ip\n\t}\n" + ip + "\t\t" + line + "\n\t}\n}"
	}
	postpaid := func(line string) string { return strings.ReplaceAll(zone(line), "zone ip\n", "zone ip postpaid\n") }
	const leads = "write descriptor <key> [<value>] zone <name>… [always|postpaid]|unlimited|denied"
	for text, want := range map[string]string{
		"rate_limit_service edge":                                               "rate_limit_service takes a block, without arguments: rate_limit_service { … }, at Caddyfile:2",
		"rate_limit_service":                                                    "rate_limit_service has no domain: add one, such as domain edge",
		"rate_limit_service {\n\tdomain\n}":                                     "domain takes one argument, not 0, at Caddyfile:3",
		"rate_limit_service {\n\tproblem\n}":                                    "unknown option problem: it must be one of domain, zone, store",
		"rate_limit_service {\n\tgrpc\n}":                                       "unknown option grpc: it must be one of domain, zone, store",
		zone("status 402"):                                                      "zone ip: status has no effect in rate_limit_service, whose responses are those of the protocol: remove it, at Caddyfile:9",
		"rate_limit_service {\n\tkey a\n}":                                      "key belongs in zone <name> { … }, in the block of rate_limit_service, at Caddyfile:3",
		plain + "\tdomain edge {\n\t}\n}":                                       "domain edge is defined twice: put the descriptors of both into one",
		domain("\t\tzone ip"):                                                   "unknown option zone: there is only descriptor <key> [<value>] zone <name>… [always|postpaid]|unlimited|denied, at Caddyfile:4",
		domain("\t\tdescriptor"):                                                leads + ", at Caddyfile:4",
		domain("\t\tdescriptor a b c zone ip"):                                  leads + ", at Caddyfile:4",
		domain("\t\tdescriptor a unlimited b"):                                  leads + ", at Caddyfile:4",
		domain("\t\tdescriptor a \"\" zone ip"):                                 leads + ", at Caddyfile:4",
		domain("\t\tdescriptor a zone ip\n\t\tdescriptor b"):                    "descriptor b: zone is missing: write zone <name>, unlimited or denied, or descriptors in a block, at Caddyfile:5",
		domain("\t\tdescriptor a b zone ip\n\t\tdescriptor a b denied"):         "descriptor a: value \"b\" is there twice: remove one, at Caddyfile:5",
		domain("\t\tdescriptor a zone ip\n\t\tdescriptor a * denied"):           "descriptor a: value * stands for any value: remove it, because a descriptor without a value takes any, at Caddyfile:5",
		domain("\t\tdescriptor a zone ip {\n\t\t\tdescriptor b zone iq\n\t\t}"): "descriptor b: zone iq is not defined: add zone iq { … } to the block of rate_limit_service, did you mean ip?, at Caddyfile:5",
		domain("\t\tdescriptor a zone ip b"):                                    "descriptor a: zone b is not defined: add zone b { … } to the block of rate_limit_service, at Caddyfile:4",
		domain("\t\tdescriptor a zone ip ip"):                                   "descriptor a: zone ip is there twice: remove one, at Caddyfile:4",
		domain("\t\tdescriptor a zone ip postpaid b"):                           leads + ", at Caddyfile:4",
		postpaid("batch 2"):                                                     "descriptor ip: postpaid does not go with the batch, which takes ahead of zone ip: remove that, or write another zone, at Caddyfile:4",
		postpaid("penalty 1m"):                                                  "descriptor ip: postpaid does not go with the penalty, which would punish for what was used already of zone ip",
		postpaid("algorithm sliding_log"):                                       "descriptor ip: postpaid does not go with the algorithm sliding_log, which keeps events one by one of zone ip",

		domain("\t\tdescriptor a unlimited"):         "zone ip: descriptor leads to this zone nowhere: write descriptor <key> zone ip in a domain, or remove the zone",
		zone("charge after"):                         "zone ip: charge after goes with responses, and rate_limit_service sees none: remove it, at Caddyfile:9",
		zone("obey_upstream"):                        "zone ip: obey_upstream has no effect in rate_limit_service, which sees no responses: remove it, at Caddyfile:9",
		zone("count_status 2xx"):                     "zone ip: count_status has no effect in rate_limit_service, which sees no responses: remove it, at Caddyfile:9",
		zone("reset_status 2xx"):                     "zone ip: reset_status has no effect in rate_limit_service",
		zone("algorithm concurrency"):                "zone ip: algorithm concurrency counts requests while they run, and a service does not know when they end",
		zone("cost {http.rate_limit.response.size}"): "zone ip: cost {http.rate_limit.response.size} is known when a response has ended",
		zone("ipv6_prefix 64"):                       "zone ip: ipv6_prefix needs a key with the address alone: add key {rate_limit_service.remote_address}, at Caddyfile:9",
	} {
		if _, err := adapt(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\n%v\nwant\n%s", text, err, want)
		}
	}
	for _, text := range []string{zone("batch auto"), zone("max_wait 1s"), zone("charge before"), plain + "}", plain + "\theaders both\n\tjitter 0.1\n}"} {
		config, err := adapt(text)
		caddytest.Must(t, text, err)
		caddytest.Must(t, text, caddytest.Validate(config))
	}
}

func service(fields string) string {
	return `{"apps": {"http": {"servers": {"s": {"listen": [":0"], "routes": [{"handle": [{"handler": "rate_limit_service", ` + fields + `}]}]}}}}}`
}

const entry = `"domains": [{"name": "a", "descriptors": [{"key": "ip", "zone": "ip"}]}]`

const zones = `"zones": [{"name": "ip", "events": 5, "window": "1m"}]`

// configsInJSON are fields of the handler, the error at load, and whether they fit the schema, which
// knows no references.
var configsInJSON = []struct {
	fields, want string
	fits         bool
}{
	{`"domains": [{"name": "a", "descriptors": [{"key": "ip", "zone": "ip"}]}], ` + zones, "", true},
	{`"domains": [{"name": "a", "descriptors": [{"key": "ip", "value": "a*", "denied": true, "descriptors": [{"key": "b", "unlimited": true}]}]}]`, "", true},
	{zones, `domains is empty: add one, such as {"name": "edge"`, false},
	{`"domains": [null]`, "domains[0] is null", false},
	{`"domains": [{"descriptors": []}]`, "domains[0].name is missing", false},
	{`"domains": [{"name": "a", "descriptors": [{"zone": "ip"}]}], ` + zones, "domains[0].descriptors[0].key is missing: add the key of the entry", false},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "descriptors": [null]}]}]`, "domains[0].descriptors[0].descriptors[0] is null", false},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "descriptors": [{"key": "c"}]}]}]`, "domains[0].descriptors[0].descriptors[0].zone is missing", false},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "zone": "x"}]}]`, "domains[0].descriptors[0].zone x is not defined: add it to zones", true},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "zone": "ip", "denied": true}]}], ` + zones, "domains[0].descriptors[0].zone and unlimited or denied exclude each other", true},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "always": true, "denied": true}]}]`, "domains[0].descriptors[0].always goes with zone only", true},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "postpaid": true, "denied": true}]}]`, "domains[0].descriptors[0].postpaid goes with zone only", true},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "zone": "ip", "always": true, "postpaid": true}]}], ` + zones, "domains[0].descriptors[0].postpaid and always exclude each other", true},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "zone": "ip", "zones": ["ip"]}]}], ` + zones, "domains[0].descriptors[0].zone and unlimited or denied exclude each other", true},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "zones": ["ip"], "postpaid": true}]}], ` + zones, "", true},
	{`"domains": [{"name": "a", "descriptors": [{"key": "b", "zones": ["ip", "iq"]}]}], ` + zones, "domains[0].descriptors[0].zone iq is not defined", true},
	{`"domains": [{"name": "a"}], ` + zones, "zones.ip is the zone of no descriptor", true},
	{`"domains": [{"name": "a", "descriptor": []}]`, "domains[0].descriptor: unknown field", false},
	{`"domains": [{"name": "a", "descriptors": [{"key": 5}]}]`, "domains[0].descriptors[0].key: it must be a text", false},
	{`"problem": true, "domains": [{"name": "a"}]`, "problem has no effect in rate_limit_service", false},
	{`"grpc": true, "domains": [{"name": "a"}]`, "grpc has no effect in rate_limit_service", false},
	{entry + `, "zones": [{"name": "ip", "events": 5, "algorithm": "concurrency"}]`, "algorithm concurrency counts requests while they run", false},
	{entry + `, "zones": [{"name": "ip", "events": 5, "window": "1m", "charge": "after"}]`, "charge after goes with responses", false},
	{entry + `, "zones": [{"name": "ip", "events": 5, "window": "1m", "count_status": [200]}]`, "count_status has no effect", false},
	{entry + `, "zones": [{"name": "ip", "events": 5, "window": "1m", "count_status_not": [200]}]`, "count_status_not has no effect", false},
	{entry + `, "zones": [{"name": "ip", "events": 5, "window": "1m", "reset_status": [200]}]`, "reset_status has no effect", false},
	{entry + `, "zones": [{"name": "ip", "events": 5, "window": "1m", "obey_upstream": true}]`, "obey_upstream has no effect", false},
	{entry + `, "zones": [{"name": "ip", "events": 5, "window": "1m", "status": 402}]`, "status has no effect", false},
	{entry + `, "zones": [{"name": "ip", "events": 5, "window": "1m", "ipv6_prefix": 64}]`, "ipv6_prefix needs a key", false},
	{`"rate_limits": {}, "domains": [{"name": "a"}]`, "rate_limits: unknown field", false},
}

// TestErrorsInJSON name the field, and what to do.
func TestErrorsInJSON(t *testing.T) {
	for _, x := range configsInJSON {
		switch err := caddytest.Validate([]byte(service(x.fields))); {
		case x.want == "" && err != nil, x.want != "" && (err == nil || !strings.Contains(err.Error(), x.want)):
			t.Errorf("%s: %v, want %s", x.fields, err, x.want)
		}
	}
}
