package fleet

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

// rule is what becomes of a field when the answers of Caddys are merged.
type rule string

const (
	// alike: Caddys have the same, or their elements are not the same one.
	alike rule = "alike"
	// told: that of one Caddy, and a problem says that another one differs.
	told rule = "told"
	// inside: the rules of its type hold.
	inside rule = "inside"
	sum    rule = "sum"
	most   rule = "most"
	least  rule = "least"
	anyOne rule = "any"
	all    rule = "all"
	// leader: that of the Caddy that knows the latest, or has counted most.
	leader rule = "leader"
	// knowing: that of a Caddy whose config knows the client.
	knowing rule = "knowing"
	// filled: merging fills it in, or lists that of each Caddy. Other tests hold it.
	filled rule = "filled"
	// tested: other tests hold it.
	tested rule = "tested"
)

// isAlike reports whether the field of the first Caddy is shown.
func (r rule) isAlike() bool { return r == alike || r == told }

// mergeRules has a rule for each field of the answers: without one, a field would be that of the first Caddy.
var mergeRules = map[string]rule{
	"Status.Instances": filled, "Status.Problems": inside, "Status.Zones": inside, "Status.Stores": inside,

	"Instance.ID": filled, "Instance.Name": filled, "Instance.Address": filled, "Instance.Version": filled, "Instance.Uptime": filled,
	"Instance.Error": filled, "Instance.Same": filled,

	"Problem.Kind": alike, "Problem.Store": alike, "Problem.Shard": alike, "Problem.Zone": alike, "Problem.Server": alike, "Problem.Text": alike,
	"Problem.Since": least, "Problem.Addresses": filled,

	"Zone.Name": alike, "Zone.Store": alike, "Zone.Rollout": told, "Zone.Algorithm": alike, "Zone.Key": alike, "Zone.Events": alike,
	"Zone.Burst": alike, "Zone.Window": alike, "Zone.Calendar": alike, "Zone.Charge": alike, "Zone.Enforce": told, "Zone.Definition": told,
	"Zone.Rule": leader, "Zone.Decisions": sum, "Zone.LastRefused": most, "Zone.Shares": filled,
	"ZoneShare.Address": filled, "ZoneShare.Decisions": filled, "ZoneShare.Rule": filled,
	"Rollout.Store": alike, "Rollout.Percent": alike, "Rollout.By": alike,

	"Store.Name": alike, "Store.Module": alike, "Store.Shared": tested, "Store.Buckets": sum, "Store.Shards": inside, "Store.Ledger": inside,
	"Shard.Name": alike, "Shard.Kind": alike, "Shard.Retired": all, "Shard.Found": all, "Shard.Servers": inside,
	"Server.Address": alike, "Server.Role": tested, "Server.State": tested, "Server.Breakers": tested, "Server.Lag": most, "Server.Latency": most,
	"Server.Pools": inside, "Server.Queued": sum,
	"Pool.Connections": sum, "Pool.Idle": sum, "Pool.Hits": sum, "Pool.Misses": sum, "Pool.Timeouts": sum, "Pool.Stale": sum,
	"Ledger.Buckets": sum, "Ledger.InFlight": sum, "Ledger.Unsent": sum, "Ledger.Uncertain": sum, "Ledger.LocalRefusals": sum,
	"Ledger.UnaskedAdmissions": sum, "Ledger.Batches": inside,
	"Batches.Fetched": sum, "Batches.Tokens": sum, "Batches.Returned": sum, "Batches.Expired": sum,

	"Client.ClientKey": alike, "Client.Template": knowing, "Client.Values": knowing, "Client.Note": knowing, "Client.Unknown": all,

	"Top.Zone": alike, "Top.Since": most, "Top.Refused": inside, "Top.Unanswered": filled, "Tops.Zones": inside, "Tops.Unanswered": filled,
	"RefusedClient.Client": inside, "RefusedClient.Store": alike, "RefusedClient.Count": sum, "RefusedClient.LastRefused": most,
	"RefusedClient.Shares": filled, "ClientShare.Address": filled, "ClientShare.Count": filled,

	"Near.Zone": alike, "Near.Percent": least, "Near.Full": most, "Near.Clients": inside, "Near.Unlisted": filled, "Near.Unanswered": filled,
	"Nears.Zones": inside, "Nears.Unanswered": filled,
	"NearClient.Client": inside, "NearClient.Store": alike, "NearClient.Limit": leader, "NearClient.Used": leader, "NearClient.Reset": leader,
	"NearClient.Address": filled, "NearClient.Seen": filled, "Sighting.Address": filled, "Sighting.Used": filled,

	"Found.Zones": inside, "Found.Errors": filled, "Found.Unanswered": filled,
	"Matches.Clients": inside, "Matches.More": anyOne, "Matches.Unlisted": filled, "Matches.Unanswered": filled,
	"Match.Zone": alike, "Match.NearClient": inside,

	"Buckets.Zone": alike, "Buckets.Store": alike, "Buckets.Buckets": inside, "Buckets.Unanswered": filled,
	"Bucket.BucketName": inside, "Bucket.Copies": inside, "Bucket.Previous": inside, "Bucket.Local": leader, "Bucket.Ledger": inside,
	"Bucket.Overrides": inside, "Bucket.LastRefused": most, "BucketName.Client": inside, "BucketName.Text": alike,
	"Copies.Shard": alike, "Copies.Servers": inside, "Copy.Address": alike, "Copy.Role": alike, "Copy.State": tested, "Copy.Error": tested,
	"State.Limit": leader, "State.Used": leader, "State.Remaining": leader, "State.Reset": leader, "State.Penalty": leader,
	"Account.Used": most, "Account.InFlight": sum, "Account.Unsent": sum, "Account.Reserved": sum, "Account.Full": anyOne, "Account.IsAlone": anyOne,
	"Resets.Zone": alike, "Resets.Store": alike, "Resets.Buckets": inside, "Resets.Unanswered": filled,
	"Reset.BucketName": inside, "Reset.Shard": alike, "Reset.Deleted": anyOne,

	"Overrides.Overrides": inside, "Overrides.Errors": filled, "Overrides.Unanswered": filled,
	"Override.Kind": alike, "Override.Zone": alike, "Override.Store": alike, "Override.Client": leader, "Override.Events": leader,
	"Override.Burst": leader, "Override.Enforce": leader, "Override.Rollout": leader, "Override.Since": leader, "Override.Until": leader,
	"Override.ReplacedUntil": leader, "Override.ReplacedDamaged": leader, "Override.Reason": leader, "Override.By": leader,
	"Override.Version": leader, "Override.Warning": leader, "Override.Copies": leader,
	"Copies.Shards": leader, "Copies.OfShards": leader, "Copies.Replicas": leader, "Copies.OfReplicas": leader, "Override.Addresses": filled,

	"Audit.Changes": inside, "Audit.Errors": filled, "Audit.Unanswered": filled,
	"AuditedChange.At": alike, "AuditedChange.Store": alike, "AuditedChange.Zone": alike, "AuditedChange.Kind": alike, "AuditedChange.Client": alike,
	"AuditedChange.By": alike, "AuditedChange.Reason": alike, "AuditedChange.Before": alike, "AuditedChange.After": alike,

	"History.Range": alike, "History.Step": alike, "History.Start": tested, "History.Partial": tested, "History.Zones": inside, "History.Unanswered": filled,
	"ZoneHistory.Zone": alike, "ZoneHistory.Allowed": sum, "ZoneHistory.WouldRefuse": sum, "ZoneHistory.Refused": sum,
	"ZoneHistory.Unchecked": sum, "ZoneHistory.Waited": sum, "ZoneHistory.StoreCalls": sum, "ZoneHistory.StoreLatency": tested,
}

// TestEachFieldHasARule: two answers that differ in each field that may differ are merged in both orders.
func TestEachFieldHasARule(t *testing.T) {
	used := map[string]bool{}
	checkMerge(t, used, mergeStatus)
	checkMerge(t, used, mergeTop)
	checkMerge(t, used, mergeTops)
	checkMerge(t, used, mergeNear)
	checkMerge(t, used, mergeNears)
	checkMerge(t, used, mergeHistory)
	checkMerge(t, used, mergeMatches)
	checkMerge(t, used, mergeFound)
	checkMerge(t, used, mergeBuckets)
	checkMerge(t, used, mergeResets)
	checkMerge(t, used, mergeOverrides)
	checkMerge(t, used, mergeAudit)
	for field := range mergeRules {
		if !used[field] {
			t.Errorf("no answer has a field %s", field)
		}
	}
}

// TestDifferencesAreTold merges two answers that differ in one field only, which the zone shows of one Caddy.
func TestDifferencesAreTold(t *testing.T) {
	c := ruleCheck{t: t, used: map[string]bool{}}
	zones := reflect.TypeFor[adminapi.Zone]()
	found := 0
	for i := range zones.NumField() {
		name := "Zone." + zones.Field(i).Name
		if mergeRules[name] != told {
			continue
		}
		found++
		var answers [2]adminapi.Status
		for n := range answers {
			answers[n].Zones = []adminapi.Zone{{Name: "api", Store: "default"}}
			if field := reflect.ValueOf(&answers[n].Zones[0]).Elem().Field(i); n == 0 || field.Kind() != reflect.Pointer {
				c.fill(field, inside, 1+n)
			}
		}
		if merged := mergeStatus(parts(answers[0], answers[1]), asked{}); len(merged.Problems) != 1 || merged.Problems[0].Kind != adminapi.ProblemDisagreement {
			t.Errorf("%s: problems are %+v", name, merged.Problems)
		}
	}
	if found == 0 {
		t.Error("no field has the rule")
	}
}

func checkMerge[T any](t *testing.T, used map[string]bool, merge func([]part[T], asked) T) {
	t.Helper()
	c := ruleCheck{t: t, used: used}
	low, high := c.answer(reflect.TypeFor[T](), 1), c.answer(reflect.TypeFor[T](), 2)
	// Stores and their servers are called alike, too.
	a := asked{known: &adminapi.Status{Stores: []adminapi.Store{shared("alike", "r:1")}}}
	for _, order := range [][2]reflect.Value{{low, high}, {high, low}} {
		merged := merge(parts(order[0].Interface().(T), order[1].Interface().(T)), a)
		c.compare(reflect.TypeFor[T]().Name(), inside, reflect.ValueOf(merged), low, high)
	}
}

type ruleCheck struct {
	t    *testing.T
	used map[string]bool
}

// fieldsOf calls back for each field of a type of the API that is in JSON.
func (c *ruleCheck) fieldsOf(of reflect.Type, then func(i int, name string, by rule)) {
	for i := range of.NumField() {
		name := of.Name() + "." + of.Field(i).Name
		if of.Field(i).Tag.Get("json") == "-" {
			continue
		}
		by, ok := mergeRules[name]
		if c.used[name] = true; !ok {
			c.t.Errorf("%s has no rule: say what becomes of it when answers of several Caddys are merged, and merge it so", name)
			by = filled
		}
		then(i, name, by)
	}
}

// answer makes an answer with a number of its own in each field that may differ.
func (c *ruleCheck) answer(of reflect.Type, n int) reflect.Value {
	v := reflect.New(of).Elem()
	c.fill(v, inside, n)
	return v
}

func (c *ruleCheck) fill(v reflect.Value, by rule, n int) {
	if by.isAlike() || by == tested {
		n = 0
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("alike")
		if n > 0 {
			v.SetString(fmt.Sprint("text ", n))
		}
	case reflect.Bool:
		// The one that counts less does not know the client either.
		v.SetBool(n != 1)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(max(n, 1)))
	case reflect.Float64:
		v.SetFloat(float64(max(n, 1)))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		c.fill(v.Elem(), by, n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		c.fill(v.Index(0), by, n)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		element := reflect.New(v.Type().Elem()).Elem()
		c.fill(element, by, n)
		v.SetMapIndex(reflect.ValueOf("key"), element)
	case reflect.Struct:
		c.fieldsOf(v.Type(), func(i int, _ string, own rule) {
			// A struct that is alike is alike in all fields.
			if by.isAlike() || by == tested {
				own = by
			}
			c.fill(v.Field(i), own, n)
		})
	default:
		c.t.Fatalf("no value of a %s", v.Type())
	}
}

// compare checks the merged value got against the rule. low and high are the values of the two answers.
func (c *ruleCheck) compare(name string, by rule, got, low, high reflect.Value) {
	switch {
	case by == filled || by == tested:
		return
	case by == inside && got.Kind() == reflect.Struct:
		c.fieldsOf(got.Type(), func(i int, field string, own rule) {
			c.compare(strings.TrimSpace(name+" "+field), own, got.Field(i), low.Field(i), high.Field(i))
		})
		return
	case got.Kind() == reflect.Pointer && by != leader && !by.isAlike():
		if got.IsNil() {
			c.t.Errorf("%s is nil", name)
			return
		}
		c.compare(name, by, got.Elem(), low.Elem(), high.Elem())
		return
	case got.Kind() == reflect.Slice && (by == inside || by == sum):
		if got.Len() != 1 {
			c.t.Errorf("%s: %d elements of two that are one: %+v", name, got.Len(), got.Interface())
			return
		}
		c.compare(name, by, got.Index(0), low.Index(0), high.Index(0))
		return
	case got.Kind() == reflect.Map:
		key := reflect.ValueOf("key")
		c.compare(name, by, got.MapIndex(key), low.MapIndex(key), high.MapIndex(key))
		return
	}
	want := high.Interface()
	switch by {
	case least, all, knowing, alike, told:
		want = low.Interface()
	case sum:
		want = reflect.ValueOf(3).Convert(got.Type()).Interface()
	}
	if !reflect.DeepEqual(got.Interface(), want) {
		c.t.Errorf("%s is %+v, want %+v by the rule %q", name, got.Interface(), want, by)
	}
}
