package operate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// roundTrips is how many are timed: the shortest says most about a server's clock,
	// and about what a check has to take at least.
	roundTrips = 5
	// lagPeriod is the time between readings of a replica that has not caught up.
	lagPeriod = 50 * time.Millisecond
	// searchPause is the time before a search for nodes is repeated.
	searchPause = 100 * time.Millisecond
	// suffixTries bounds the search for a key in the slots of a node.
	suffixTries = 1 << 20
)

// The codes of findings.
const (
	codeUnfound     = "not_found"
	codeUnreachable = "unreachable"
	codeTLS         = "tls"
	codeUnverified  = "tls_unverified"
	codePlain       = "no_tls"
	codeLogin       = "login"
	codeNotReady    = "not_ready"
	codeSlow        = "slow"
	codeDatabase    = "database"
	codeRights      = "rights"
	codeKeys        = "keys"
	codeCommands    = "commands"
	codeWrites      = "writes_refused"
	codeVersion     = "version"
	codeEviction    = "eviction"
	codePersistence = "persistence"
	codeRole        = "role"
	codeWritable    = "replica_writable"
	codeStale       = "replica_stale"
	codeDetached    = "replica_detached"
	codeForeign     = "replica_foreign"
	codeLag         = "replica_lags"
	codeNoReplica   = "no_replica"
	codeClock       = "clock"
	codeSentinels   = "sentinels_differ"
	codeSlots       = "slots"
	codeElsewhere   = "foreign_server"
	codeNoQuorum    = "no_quorum"
	codeTurns       = "round_robin"
	codeVague       = "unidentified"
)

// Diagnose reports whether the servers are fit for the store, as [store.Operable] says. It uses
// the options of the shards, and neither their connections nor what they do in the background.
func (p *Operator) Diagnose(ctx context.Context) (found store.Diagnosis) {
	members := slices.Concat(p.members, p.retired())
	diagnosers := make([]*shardDiagnoser, len(members))
	var all sync.WaitGroup
	for i, m := range members {
		d := &shardDiagnoser{operator: p, shard: m.Shard}
		d.report = store.ShardDiagnosis{
			Name: m.Name, Kind: m.Shard.Kind, Retired: i >= len(p.members),
			Servers: []store.ServerDiagnosis{}, Keyspace: fmt.Sprintf("%d %s", m.Shard.Options.DB, p.asker.Keys.Prefix),
		}
		diagnosers[i] = d
		all.Go(func() { d.run(ctx) })
	}
	all.Wait()
	for _, d := range diagnosers {
		d.judgeSecrecy()
		found.Shards = append(found.Shards, d.report)
		found.Findings = append(found.Findings, d.findings...)
	}
	return found
}

// shardDiagnoser diagnoses a shard.
type shardDiagnoser struct {
	operator *Operator
	shard    *Shard
	report   store.ShardDiagnosis
	findings []store.Finding
	// sources are the given sentinels or nodes.
	sources []wire.Source
}

func finding(severity store.Severity, code, problem, remedy string) store.Finding {
	return store.Finding{Severity: severity, Code: code, Problem: problem, Remedy: remedy}
}

// add adds findings about a server, or with an empty address about the shard.
func (d *shardDiagnoser) add(addr string, findings ...store.Finding) {
	for _, f := range findings {
		f.Shard, f.Address = d.report.Name, addr
		d.findings = append(d.findings, f)
	}
}

// timeout bounds the wait for a reply. A server that is slower than CheckTimeout is to be
// found slow, and not out of reach.
func (d *shardDiagnoser) timeout() time.Duration {
	return d.shard.Options.ReplyWithin(infoTimeout)
}

func (d *shardDiagnoser) run(ctx context.Context) {
	if login := d.shard.Options.Credentials; login != nil {
		// A command that prints a password may take longer than connecting may.
		if _, _, err := login(ctx); err != nil {
			d.add("", finding(store.SeverityError, codeLogin, "there is no password for its servers: "+err.Error(),
				"correct username, password, password_command or url"))
			return
		}
	}
	found := d.locate(ctx)
	groups := make([][]*serverDiagnoser, len(found))
	var all sync.WaitGroup
	for i, r := range found {
		key := d.probeKey(r.Slots)
		begin := func(role store.Role, addrs ...string) {
			for _, addr := range addrs {
				v := &serverDiagnoser{shardDiagnoser: d, key: key, report: store.ServerDiagnosis{Address: addr, Role: role}}
				groups[i] = append(groups[i], v)
				all.Go(func() { v.run(ctx) })
			}
		}
		downRole := store.RoleNode
		if r.Primary != "" {
			downRole = store.RoleReplica
			begin(store.RolePrimary, r.Primary)
		}
		begin(store.RoleReplica, r.Replicas...)
		begin(downRole, r.Down...)
		begin(store.RoleNode, r.nodes...)
	}
	all.Wait()
	for i, group := range groups {
		if found[i].Primary != "" {
			all.Go(func() { group[0].follow(ctx, group[1:]) })
		}
	}
	all.Wait()
	for i, group := range groups {
		d.wantReplicas(found[i].Roles)
		for _, v := range group {
			v.close()
			d.report.Servers = append(d.report.Servers, v.report)
			d.add(v.report.Address, v.findings...)
		}
	}
	if slices.ContainsFunc(found, func(r located) bool { return r.Primary != "" }) {
		d.wantQuorum()
	}
}

// judgeSecrecy adds the findings of connections that others can read or take over.
func (d *shardDiagnoser) judgeSecrecy() {
	opts := &d.shard.Options
	if opts.TLS != nil {
		if opts.TLS.InsecureSkipVerify {
			d.add("", finding(store.SeverityWarning, codeUnverified, "no certificate is verified, so another server can pass for one of its own", "remove insecure_skip_verify, and name the authority in tls: ca <file>"))
		}
		return
	}
	var exposed []string
	for i := range d.report.Servers {
		server := &d.report.Servers[i]
		login := opts.Credentials
		if server.Role == store.RoleSentinel {
			login = opts.Sentinel.Credentials
		}
		if login != nil && !isLocal(server.Address) {
			exposed = append(exposed, server.Address)
		}
	}
	if len(exposed) > 0 {
		d.add("", finding(store.SeverityWarning, codePlain, "the password goes over the network in the clear, to "+strings.Join(exposed, ", "), "set up TLS there, and the option tls"))
	}
}

// isLocal reports whether an address is certain to be on this machine.
func isLocal(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return strings.HasPrefix(addr, "unix/")
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// timeLeft is the time until ctx ends, at most an hour.
func timeLeft(ctx context.Context) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		return min(time.Until(end), time.Hour)
	}
	return time.Hour
}

// located are servers that hold the same buckets.
type located struct {
	wire.Roles
	// nodes are configured nodes of a cluster which does not name them.
	nodes []string
}

// locate returns the servers of the shard, and adds what it finds on the way to them.
func (d *shardDiagnoser) locate(ctx context.Context) []located {
	switch {
	case d.shard.Options.Sentinel != nil:
		return d.askSentinels(ctx)
	case d.shard.InCluster:
		return d.askCluster(ctx)
	default:
		return []located{{Roles: wire.Roles{Primary: d.shard.Options.Primary, Replicas: d.shard.Options.Replicas}}}
	}
}

// askSentinels returns the servers that the sentinels name.
func (d *shardDiagnoser) askSentinels(ctx context.Context) []located {
	s := wire.NewSentinel(&d.shard.Options)
	defer s.Close()
	if login := d.shard.Options.Sentinel.Credentials; login != nil {
		if _, _, err := login(ctx); err != nil {
			d.add("", finding(store.SeverityError, codeLogin, "there is no password for its sentinels: "+err.Error(), "correct sentinel_username or sentinel_password"))
			return nil
		}
	}
	within, cancel := context.WithTimeout(ctx, min(d.shard.Options.ConnectTimeout()+d.shard.Options.SearchTimeout(), timeLeft(ctx)/2))
	defer cancel()
	answers := s.AskAll(within)
	identifying, cancel := context.WithTimeout(ctx, min(d.shard.Options.ConnectTimeout()+d.timeout(), timeLeft(ctx)/2))
	defer cancel()
	found, sources, err := s.Judge(identifying, answers, time.Now())
	d.addSources(sources)
	var fault *wire.Fault
	for i, a := range answers {
		addr := d.shard.Options.Sentinel.Addrs[i]
		d.report.Servers = append(d.report.Servers, store.ServerDiagnosis{Address: addr, Role: store.RoleSentinel, Reachable: a.Err == nil || wire.IsReply(a.Err) || errors.As(a.Err, new(*wire.Fault))})
		switch m, ok := wire.MeaningOf(a.Err); {
		case sources[i].IsForeign:
		case a.Err == nil && a.Primary != found.Primary:
			d.add(addr, finding(store.SeverityWarning, codeSentinels, fmt.Sprintf("it takes %s for the primary, and another sentinel takes %s", a.Primary, found.Primary),
				"see that the sentinels reach each other, watch the same servers under this name, and announce them alike (announce-hostnames)"))
		case a.Err == nil:
		case ok && m.Kind == store.KindAuth && m.Hint&wire.Shut == 0:
			d.add(addr, finding(store.SeverityError, codeRights, "its user lacks a right: "+a.Err.Error(), "ACL SETUSER <user> +"+strings.Join(sentinelRights, " +")))
		case errors.As(a.Err, &fault):
			d.add(addr, finding(store.SeverityError, fault.Code, fault.Problem, fault.Remedy))
		default:
			d.add(addr, d.outage(a.Err, "sentinel_"))
		}
	}
	if err != nil {
		d.add("", finding(store.SeverityError, codeUnfound, "no sentinel names the servers", "correct what is wrong with the sentinels"))
		return nil
	}
	return []located{{Roles: found.Roles}}
}

// askCluster returns the servers that a node names, and the given nodes that it does not
// name.
func (d *shardDiagnoser) askCluster(ctx context.Context) (all []located) {
	c := wire.NewCluster(&d.shard.Options)
	defer c.Close()
	within, cancel := context.WithTimeout(ctx, timeLeft(ctx)/2)
	defer cancel()
	result, err := c.FindAll(within, d.shard.Options.NodeTimeout())
	for isTimeout(err) && wire.Pause(within, searchPause) {
		// Connecting goes on after a search.
		result, err = c.FindAll(within, d.shard.Options.NodeTimeout())
	}
	d.addSources(result.Sources)
	if c.IsVague() {
		d.add("", finding(store.SeverityNote, codeVague, wire.ErrVague.Problem, wire.ErrVague.Remedy))
	}
	found := result.Roles
	if err != nil {
		remedy := "correct what is wrong with the nodes, or give others in the option cluster"
		if isTimeout(err) {
			remedy += fmt.Sprintf("; a node has %s to answer, and more with a longer check_timeout", d.shard.Options.NodeTimeout())
		}
		problem := "no node names the servers: " + err.Error()
		var fault *wire.Fault
		if errors.As(err, &fault) {
			// Each node that has the fault repeats the remedy.
			problem, remedy = strings.ReplaceAll(problem, ": "+fault.Remedy, ""), fault.Remedy
		}
		d.add("", finding(store.SeverityError, codeUnfound, problem, remedy))
	} else if left := unassigned(found); left > 0 {
		node := cmp.Or(wire.FirstPrimary(found), "<node>")
		remedy := "assign them to a node: redis-cli --cluster fix " + node
		if dead := deadIn(found); len(dead) > 0 {
			// The command assigns the slots of all that are down.
			remedy = fmt.Sprintf("restart %s; if one is gone for good, restart the others first, then give its slots to other nodes: redis-cli --cluster fix %s --cluster-fix-with-unreachable-masters", strings.Join(dead, ", "), node)
		}
		d.add("", finding(store.SeverityError, codeSlots, fmt.Sprintf("%d of its %d slots have no primary that answers, so their clients cannot be counted", left, wire.SlotCount), remedy))
	}
	var named []string
	for _, r := range found {
		all = append(all, located{Roles: r})
		named = append(append(append(named, r.Primary), r.Replicas...), r.Down...)
	}
	if rest := slices.DeleteFunc(slices.Clone(d.shard.Options.Cluster), func(addr string) bool { return slices.Contains(named, addr) }); len(rest) > 0 {
		all = append(all, located{nodes: rest})
	}
	return all
}

// unassigned returns how many slots no primary has.
func unassigned(found []wire.Roles) int {
	served := slices.DeleteFunc(slices.Clone(found), func(r wire.Roles) bool { return r.Primary == "" })
	return wire.SlotCount - wire.Covered(served)
}

// deadIn returns the nodes that are considered down and have no successor: of some, Redis 8.0 does
// not tell the slots.
func deadIn(found []wire.Roles) (dead []string) {
	for _, r := range found {
		if r.Primary == "" {
			dead = append(dead, r.Down...)
		}
	}
	return dead
}

// probeKey returns a key that is never that of a bucket, in one of the slots if there are
// any: a node refuses writes of its own slots alone for want of memory or replicas.
func (d *shardDiagnoser) probeKey(slots []wire.SlotRange) string {
	key := d.operator.asker.Keys.Prefix + ":#check"
	if len(slots) == 0 {
		return key
	}
	for n := range suffixTries {
		if slot := int(wire.SlotOf([]byte(key + strconv.Itoa(n)))); slices.ContainsFunc(slots, func(r wire.SlotRange) bool { return r.First <= slot && slot <= r.Last }) {
			return key + strconv.Itoa(n)
		}
	}
	return key
}

// wantReplicas adds a finding if a primary has no replica, and one would be of use. One
// that is down has a finding of its own.
func (d *shardDiagnoser) wantReplicas(r wire.Roles) {
	isUseless := d.operator.asker.ReadPrimary && !d.shard.Finds()
	if r.Primary == "" || len(r.Replicas)+len(r.Down) > 0 || isUseless || d.shard.InCluster && len(r.Slots) == 0 {
		return
	}
	problem := "it has no replica: while it is away, nothing answers checks"
	if d.shard.Finds() {
		problem += ", and nothing can take its place"
	}
	d.add(r.Primary, finding(store.SeverityWarning, codeNoReplica, problem, "add a replica"))
}

// serverDiagnoser diagnoses one server.
type serverDiagnoser struct {
	*shardDiagnoser
	key      string
	report   store.ServerDiagnosis
	findings []store.Finding
	client   *goredis.Client
	// isUnfit is set if it is of a kind that cannot keep buckets: no more is asked of it.
	isUnfit bool
	// info is the last reply to INFO, nil if that was infoErr.
	info    info
	infoErr error
}

func (v *serverDiagnoser) find(severity store.Severity, code, problem, remedy string) {
	v.findings = append(v.findings, finding(severity, code, problem, remedy))
}

// findFault adds the finding of a fault, if there is one.
func (v *serverDiagnoser) findFault(severity store.Severity, code string, err error) {
	var f *wire.Fault
	if errors.As(err, &f) {
		v.find(severity, code, f.Problem, f.Remedy)
	}
}

func (v *serverDiagnoser) close() {
	if v.client != nil {
		_ = v.client.Close()
	}
}

// call makes a call that has a reply's time.
func (v *serverDiagnoser) call(ctx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, v.timeout())
	defer cancel()
	return f(ctx)
}

func (v *serverDiagnoser) run(ctx context.Context) {
	if err := v.connect(ctx); err != nil {
		v.report.Reachable = wire.IsReply(err) || isGarbled(err)
		v.findings = append(v.findings, v.outage(err, ""))
		return
	}
	v.report.Reachable = true
	for _, step := range []func(ctx context.Context) error{v.measure, v.readInfo, v.readMode, v.readRights} {
		if err := step(ctx); err != nil {
			v.findings = append(v.findings, v.outage(err, ""))
			return
		}
		if v.isUnfit {
			return
		}
	}
	if v.info != nil {
		v.judge(ctx)
	}
}

// connect connects, and logs in. A server that answers otherwise than with a refusal of
// the connection is no error.
func (v *serverDiagnoser) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, v.shard.Options.ConnectTimeout()+v.timeout())
	defer cancel()
	opts := v.shard.Options
	for {
		v.client = wire.NewClient(v.report.Address, &opts, true)
		err := v.client.Ping(ctx).Err()
		m, ok := wire.MeaningOf(err)
		switch {
		case err == nil:
			return nil
		case opts.DB != 0 && v.shard.databaseFault(err) != nil:
			// It is examined in database 0, where the probes show a missing right.
			if m.Kind != store.KindAuth {
				v.findFault(store.SeverityError, codeDatabase, v.shard.databaseFault(err))
			}
			opts.DB = 0
			v.close()
		case ok && m.Kind == store.KindLoading:
			v.find(store.SeverityError, codeNotReady, "it is loading its data", "wait until it has loaded them")
			return nil
		case ok && m.Hint&wire.Shut == 0:
			// What PING lacks, the probes show.
			return nil
		default:
			return err
		}
	}
}

// measure times round trips, and reads the server's clock.
func (v *serverDiagnoser) measure(ctx context.Context) error {
	var fastest, skew time.Duration
	var isSkewKnown bool
	for range roundTrips {
		var server time.Time
		local, began := v.operator.now(), time.Now()
		err := v.call(ctx, func(ctx context.Context) (err error) {
			server, err = v.client.Time(ctx).Result()
			return err
		})
		took := time.Since(began)
		if isClosed(err) {
			break
		}
		if err != nil && !wire.IsReply(err) {
			return err
		}
		if fastest != 0 && took >= fastest {
			continue
		}
		fastest = took
		if err == nil {
			// The reply was made in the middle, give or take half of the round trip.
			skew, isSkewKnown = server.Sub(local.Add(took/2)), true
		}
	}
	v.report.RoundTrip = fastest.Seconds()
	if limit := v.operator.asker.CheckTimeout; fastest > limit/2 {
		severity, problem := store.SeverityWarning, "the shortest of %d round trips takes %s, and checks have %s, of which one that asks a second server has half"
		if fastest > limit {
			severity, problem = store.SeverityError, "the shortest of %d round trips takes %s, and checks have %s"
		}
		v.find(severity, codeSlow, fmt.Sprintf(problem, roundTrips, fastest.Round(100*time.Microsecond), limit),
			fmt.Sprintf("raise check_timeout above %s, or bring Caddy and the server closer together", (2*fastest).Round(time.Millisecond)))
	}
	if isSkewKnown {
		v.report.ClockSkew = new(skew.Seconds())
		if fault := clockFault(skew, fastest/2); fault != nil {
			v.findFault(store.SeverityWarning, codeClock, fault)
		}
	}
	return nil
}

// readInfo reads INFO. A refusal of that is no error: readRights adds its finding.
func (v *serverDiagnoser) readInfo(ctx context.Context) error {
	return v.call(ctx, func(ctx context.Context) error {
		var text string
		switch text, v.infoErr = v.client.Info(ctx).Result(); {
		case v.infoErr == nil:
			v.info = parseInfo(text)
			return nil
		case wire.IsReply(v.infoErr), isClosed(v.infoErr):
			v.info = nil
			return nil
		default:
			v.info = nil
			return v.infoErr
		}
	})
}

// readMode finds out whether the server is of a kind that can keep the shard's buckets.
func (v *serverDiagnoser) readMode(ctx context.Context) error {
	if v.shard.InCluster {
		isUnnamed := v.report.Role == store.RoleNode && slices.Contains(v.shard.Options.Cluster, v.report.Address)
		if f := wire.KindFault(v.info.field, v.report.Address, &v.shard.Options); isUnnamed && f != nil {
			v.isUnfit = true
			v.findFault(store.SeverityError, codeRole, f)
		}
		return nil
	}
	fault := v.shard.modeOf(ctx, v.info, func(ctx context.Context) bool { return wire.Redirects(ctx, v.client, v.key) })
	v.isUnfit = fault != nil
	v.findFault(store.SeverityError, codeRole, fault)
	return nil
}

// readRights finds out what the user may do, and whether the server takes writes.
func (v *serverDiagnoser) readRights(ctx context.Context) error {
	needed := slices.Clone(basicRights)
	if v.shard.Options.DB != 0 {
		needed = append(needed, databaseRights...)
	}
	if v.shard.InCluster {
		needed = append(needed, clusterRights...)
	}
	var found, resets, overrides probed
	for _, p := range []struct {
		*probed
		rights []right
	}{{&found, needed}, {&resets, resetRights}, {&overrides, overrideRights}} {
		if err := v.call(ctx, func(ctx context.Context) (err error) {
			*p.probed, err = probeRights(ctx, v.client, v.key, p.rights)
			return err
		}); err != nil {
			return err
		}
	}
	if v.infoErr != nil && !slices.Contains(slices.Concat(found.missing, found.unknown), "info") {
		v.find(store.SeverityError, codeNotReady, "its role, version and settings are unknown: it answers INFO with "+v.infoErr.Error(), remedyOf(v.infoErr))
	}
	if !v.judgeUnclear(&found, &resets, &overrides) {
		v.report.MissingRights = append([]string{}, slices.Concat(found.missing, resets.missing, overrides.missing)...)
	}
	if i := slices.Index(found.missing, "info"); i >= 0 {
		found.missing = slices.Delete(found.missing, i, i+1)
		v.lacks(store.SeverityError, []string{"info"}, "nothing shows whether it lags or is set up wrongly")
	}
	if v.report.Role == store.RoleReplica {
		var later []string
		found.missing = slices.DeleteFunc(found.missing, func(command string) bool {
			isLater := slices.Contains(primaryCommands, command)
			if isLater {
				later = append(later, command)
			}
			return isLater
		})
		v.lacks(store.SeverityWarning, later, "charges fail once it becomes the primary (failover)")
	}
	vital, lesser := apart(found.missing)
	v.lacks(store.SeverityError, vital, "checks or charges fail")
	for consequence, commands := range lesser {
		v.lacks(store.SeverityWarning, commands, consequence)
	}
	v.lacks(store.SeverityWarning, resets.missing, "resets and reset_status fail")
	v.lacks(store.SeverityWarning, overrides.missing, "blocks, grants and reservations fail")
	if found.isKeyDenied {
		v.find(store.SeverityError, codeKeys, fmt.Sprintf("its user may not use keys that begin with %s:", v.operator.asker.Keys.Prefix), fmt.Sprintf("ACL SETUSER <user> ~%s:*", v.operator.asker.Keys.Prefix))
	}
	v.lacksCommands(ctx, slices.Concat(found.unknown, resets.unknown, overrides.unknown))
	for _, err := range found.refusals {
		if v.report.Role != store.RolePrimary {
			continue
		}
		remedy := "correct what the reply says, on the server"
		if m, _ := wire.MeaningOf(err); m.Kind == store.KindMemory {
			remedy = "give it more memory (maxmemory), or shorten windows"
		}
		v.find(store.SeverityError, codeWrites, "it refuses writes: "+err.Error(), remedy)
	}
	return nil
}

// hideable are the commands that the store does without where they are hidden, as behind many proxies;
// time only if scripts have it.
var hideable = []string{"script|load", "time", "info"}

// apart returns the commands without which checks or charges fail, and the others by what is so
// without them.
func apart(commands []string) (vital []string, lesser map[string][]string) {
	lesser = map[string][]string{}
	for _, command := range commands {
		consequence, isLesser := lesserCommands[command]
		if isLesser {
			lesser[consequence] = append(lesser[consequence], command)
		} else {
			vital = append(vital, command)
		}
	}
	return vital, lesser
}

// lacksCommands adds the findings of commands that the server, or a proxy before it, does not know.
func (v *serverDiagnoser) lacksCommands(ctx context.Context, unknown []string) {
	unknown, lesser := apart(unknown)
	hidden, missing := lesser[moreWork], []string(nil)
	delete(lesser, moreWork)
	for _, command := range unknown {
		if slices.Contains(hideable, command) && (command != "time" || !v.scriptsLackTime(ctx)) {
			hidden = append(hidden, command)
		} else {
			missing = append(missing, command)
		}
	}
	const remedy = "use Redis 7.0 or later, undo a rename-command, or give the server's address in place of a proxy's"
	if len(missing) > 0 {
		v.find(store.SeverityError, codeCommands, "it does not have the commands "+strings.Join(missing, ", "), remedy)
	}
	for consequence, commands := range lesser {
		v.find(store.SeverityWarning, codeCommands, "it does not have the commands "+strings.Join(commands, ", ")+": "+consequence, remedy)
	}
	if len(hidden) > 0 {
		v.find(store.SeverityWarning, codeCommands, "it hides the commands "+strings.Join(hidden, ", ")+", as a proxy does: "+moreWork, remedy+"; behind a proxy that spreads keys over servers, write pipelining off")
	}
}

func (v *serverDiagnoser) scriptsLackTime(ctx context.Context) bool {
	return v.call(ctx, func(ctx context.Context) error { return wire.LackOfTime(ctx, v.client, v.key) }) != nil
}

// judgeUnclear adds the finding of replies that say nothing about rights, and reports
// whether there are any.
func (v *serverDiagnoser) judgeUnclear(needed, resets, overrides *probed) bool {
	commands := slices.Concat(needed.unclear, resets.unclear, overrides.unclear)
	if len(commands) == 0 {
		return false
	}
	severity := store.SeverityWarning
	if len(needed.unclear) > 0 {
		severity = store.SeverityError
	}
	reply := cmp.Or(needed.unclearReply, resets.unclearReply, overrides.unclearReply)
	v.find(severity, codeRights, fmt.Sprintf("it is unknown whether its user may run %s: it answers %s", strings.Join(commands, ", "), reply), remedyOf(reply))
	return true
}

// remedyOf returns the remedy against a reply that executes nothing.
func remedyOf(reply error) string {
	switch m, _ := wire.MeaningOf(reply); m.Kind {
	case store.KindBusy:
		return "end the script that it runs (SCRIPT KILL), and find whose it is"
	case store.KindLoading:
		return "wait until it has loaded its data"
	default:
		return "correct what the reply says, or give the address of a Redis server instead of a proxy's"
	}
}

// lacks adds the finding of missing rights, and what fails without them.
func (v *serverDiagnoser) lacks(severity store.Severity, missing []string, consequence string) {
	if len(missing) > 0 {
		v.find(severity, codeRights, fmt.Sprintf("its user may not run %s: %s", strings.Join(missing, ", "), consequence), "ACL SETUSER <user> +"+strings.Join(missing, " +"))
	}
}

// judge judges what INFO says.
func (v *serverDiagnoser) judge(ctx context.Context) {
	v.report.ID, v.report.Version, v.report.EvictionPolicy = v.info["run_id"], v.info.version(), v.info["maxmemory_policy"]
	faults := faultsOf(v.info, v.report.Role == store.RoleReplica, v.shard.Shard)
	v.findFault(store.SeverityError, codeVersion, faults[faultVersion])
	if faults[faultVersion] == nil && !v.info.isTested() {
		v.find(store.SeverityNote, codeVersion, fmt.Sprintf("its version, %s, is newer than the tested ones", v.report.Version), fmt.Sprintf("use %s %v, or try it before you rely on it", v.info.product(), newestTested[v.info.product()]))
	}
	v.findFault(store.SeverityWarning, codeEviction, faults[faultPolicy])
	v.findFault(store.SeverityWarning, codeWritable, faults[faultWritable])
	v.findFault(store.SeverityError, codeRole, faults[faultRole])
	if v.shard.Finds() && v.report.Role != store.RoleNode && (v.report.Role == store.RoleReplica) != v.info.isReplica() {
		v.find(store.SeverityError, codeRole, fmt.Sprintf("it is found as a %s, and is none", v.report.Role), "a failover may be under way: check again when it has ended")
	}
	v.readPersistence(ctx)
	if v.report.Role == store.RoleReplica && v.setting(ctx, "replica-serve-stale-data") == "no" {
		v.findFault(store.SeverityWarning, codeStale, errStale)
	}
	if v.report.Role != store.RolePrimary {
		return
	}
	v.lookForTurns(ctx)
	switch v.report.Persistence {
	case persistenceOff:
		v.find(store.SeverityWarning, codePersistence, "it keeps nothing on disk: a restart begins every window anew", "set appendonly yes, or accept it where windows are short")
	case "":
		v.find(store.SeverityNote, codePersistence, "whether it keeps its data on disk is unknown: it has no appendonly, and its user may not ask for save", "see save in its configuration, or ACL SETUSER <user> +config|get")
	}
}

// The ways in which a server keeps its data.
const (
	persistenceLog       = "appendonly"
	persistenceSnapshots = "snapshots"
	persistenceOff       = "off"
)

// readPersistence finds out how the server keeps its data, as far as the user may ask:
// INFO does not say whether snapshots are on.
func (v *serverDiagnoser) readPersistence(ctx context.Context) {
	if v.info["aof_enabled"] == "1" {
		v.report.Persistence = persistenceLog
		return
	}
	switch points := v.setting(ctx, "save"); points {
	case unknown:
	case "":
		v.report.Persistence = persistenceOff
	default:
		v.report.Persistence = persistenceSnapshots
	}
}

// unknown stands for a setting that the user may not ask for.
const unknown = "unknown"

// setting returns a setting of the server.
func (v *serverDiagnoser) setting(ctx context.Context, name string) (value string) {
	value = unknown
	_ = v.call(ctx, func(ctx context.Context) error {
		settings, err := v.client.ConfigGet(ctx, name).Result()
		if has, ok := settings[name]; err == nil && ok {
			value = has
		}
		return err
	})
	return value
}

// follow finds out how far replicas are behind this primary, from when it is asked again:
// the diagnosis of other servers may have taken long.
func (v *serverDiagnoser) follow(ctx context.Context, replicas []*serverDiagnoser) {
	if v.info != nil && v.readInfo(ctx) != nil {
		v.info = nil
	}
	since := time.Now()
	var all sync.WaitGroup
	for _, replica := range replicas {
		switch {
		case replica.info == nil:
		case replica.info.isReplica():
			all.Go(func() { replica.judgeLag(ctx, v.info, since) })
		case !replica.isUnfit && !v.shard.Finds():
			replica.findFault(store.SeverityError, codeRole, strayFault(replica.info.sight(), v.info.sight(), v.info == nil))
		}
	}
	all.Wait()
}

// judgeLag finds out how far a replica is behind what INFO said of its primary, if that is
// known, at the instant since.
func (v *serverDiagnoser) judgeLag(ctx context.Context, primary info, since time.Time) {
	if primary != nil && !primary.isReplica() && !v.info.isDetached() {
		if !primary.history().has(v.info.offset(), v.info.history()) {
			v.find(store.SeverityError, codeForeign, errForeign.Problem, errForeign.Remedy)
			return
		}
		v.awaitOffset(ctx, primary.offset(), since)
	}
	if v.info.isDetached() {
		v.find(store.SeverityWarning, codeDetached, "its link to its primary is down, so what it has grows old and it is left out",
			"see its log; masterauth, the network between the two, or a copy of all data that is under way")
	}
}

// awaitOffset waits until the replica has what its primary had at the instant since, until
// that is longer ago than MaxReplicaLag.
func (v *serverDiagnoser) awaitOffset(ctx context.Context, goal int64, since time.Time) {
	var behind time.Duration
	for asked := time.Now(); goal >= 0 && v.readInfo(ctx) == nil && v.info != nil && !v.info.isDetached(); asked = time.Now() {
		if v.info.offset() >= goal {
			v.report.Lag = new(behind.Seconds())
			return
		}
		if behind = asked.Sub(since); behind > v.shard.Options.MaxReplicaLag {
			v.report.Lag = new(behind.Seconds())
			v.find(store.SeverityWarning, codeLag, fmt.Sprintf("it is more than %s behind its primary, and is left out above %s", behind.Round(time.Millisecond), v.shard.Options.MaxReplicaLag),
				"see that it has the processor time and the network to follow its primary")
			return
		}
		if !wire.Pause(ctx, lagPeriod) {
			return
		}
	}
}
