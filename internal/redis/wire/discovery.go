package wire

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
)

const (
	// findPeriod is the time between regular searches for the servers of a shard;
	// findPause, the least time before a search that a nudge asks for.
	findPeriod = time.Second
	findPause  = 100 * time.Millisecond
	// findTimeout is the least time for a reply in a search, and searchReplies how many a search may
	// wait for: those of a login and three questions to a sentinel, or of nodes that are silent.
	findTimeout   = 125 * time.Millisecond
	searchReplies = 4
	// obeyAfter is how long all answers have to be older than the one that is followed until they
	// are obeyed: sentinels and clusters that are set up anew count from 0 again.
	obeyAfter = time.Minute
)

// hope is how long the next search waits for answers.
type hope time.Duration

// within returns it within bounds.
func (h hope) within(least, most time.Duration) time.Duration {
	return min(max(time.Duration(h), least), most)
}

// after returns that of a search after one that waited so long: twice the time that an answer took which was enough,
// so that a silent server holds up none, or else twice that wait, because a link may be slow.
func (h hope) after(waited, took time.Duration, isEnough bool) hope {
	if isEnough {
		return hope(2 * took)
	}
	return hope(2 * waited)
}

// finder finds the servers of a shard that are not given by their addresses.
type finder interface {
	Find(ctx context.Context) (Found, error)
	Close()
}

// Found is the result of a search.
type Found struct {
	Roles []Roles
	// Sources are the given sources, even if the search has failed.
	Sources []Source
	// Replaced is set if the servers are unrelated to the servers followed before.
	Replaced bool
}

func (s *Shard) discover() {
	tick := time.NewTicker(findPeriod)
	defer tick.Stop()
	for {
		err, failing := s.Contain("", s.find), s.SearchFault() != nil
		switch {
		case s.life.Err() != nil:
			return
		case err != nil && !failing:
			s.Emit(Event{Kind: DiscoveryFailed, Err: err})
		}
		if failing && err == nil {
			s.Emit(Event{Kind: Discovered})
		}
		fault := &err
		if err == nil {
			fault = nil
		}
		s.searchFault.Store(fault)
		if !Pause(s.life, findPause) {
			return
		}
		select {
		case <-tick.C:
		case <-s.nudged:
		case <-s.life.Done():
			return
		}
	}
}

func (s *Shard) find() error {
	found, err := s.finder.Find(s.life)
	if err == nil && FirstPrimary(found.Roles) == "" {
		return ErrNoServers
	}
	if s.life.Err() != nil {
		return err
	}
	s.stand(&found)
	if err == nil {
		s.adopt(found.Roles)
	}
	return err
}

func (s *Shard) nudge() {
	select {
	case s.nudged <- struct{}{}:
	default:
	}
}

var errOlder = fmt.Errorf("every answer is older than the servers known, which stay in use; the answer is obeyed if none newer comes within %v", obeyAfter)

// history tells the answers that are older than the one that is followed: those of a sentinel or
// node that was cut off.
type history struct {
	// epoch is that of the answer that is followed.
	epoch int64
	// since is when the first of only older answers came, or zero if the last was not older.
	since time.Time
}

// follow notes the best answer of a search, and returns an error if it is too old to be followed.
// One that is not whole sets no epoch: nodes that are alone may count on.
func (h *history) follow(epoch int64, isWhole bool, now time.Time) error {
	isOlder := epoch < h.epoch
	if isOlder && h.since.IsZero() {
		h.since = now
	}
	if isOlder && now.Sub(h.since) < obeyAfter {
		return errOlder
	}
	h.since = time.Time{}
	if isOlder || isWhole {
		h.epoch = epoch
	}
	return nil
}

// SentinelOptions locate a primary and its replicas through Redis Sentinel.
type SentinelOptions struct {
	// Master is the name under which the sentinels watch the primary.
	Master string
	// Addrs are the sentinels' addresses.
	Addrs []string
	// Credentials, if set, log in to the sentinels, at each connection.
	Credentials Credentials
}

// Sentinel asks all sentinels and follows the one that knows of the latest
// failover, and that it is over: one that was cut off may name a previous primary.
type Sentinel struct {
	opts    *Options
	clients []*goredis.SentinelClient
	// connect returns a client of one of the sentinels, by its place.
	connect func(place int) *goredis.SentinelClient
	history history
	belief  belief
	// decided is the last decision, believed has its replies, and sources are the sentinels as they last answered.
	decided  decision
	believed []SentinelReply
	sources  []Source
	// patient is when a search last waited for as long as one may.
	patient time.Time
	hope    hope
	kinds   kinds
	// asked are the servers that were asked for their marks, by address.
	asked map[string]asked

	mu sync.Mutex
	// met are the marks of the primary at metAt.
	metAt string
	met   []string
}

// asked has the marks of a server, and when it was asked.
type asked struct {
	marks []string
	at    time.Time
}

// NewSentinel returns a finder that asks the sentinels of the options. It connects at its
// first use.
func NewSentinel(opts *Options) *Sentinel {
	s := &Sentinel{opts: opts, asked: map[string]asked{}}
	s.connect = func(place int) *goredis.SentinelClient {
		o := clientOptions(opts.Sentinel.Addrs[place], opts)
		o.DB, o.PoolSize, o.MaxActiveConns = 0, 1, 1
		o.CredentialsProviderContext = opts.Sentinel.Credentials
		return goredis.NewSentinelClient(o)
	}
	for i := range opts.Sentinel.Addrs {
		s.clients = append(s.clients, s.connect(i))
	}
	return s
}

// SentinelReply is what a sentinel says.
type SentinelReply struct {
	Roles
	epoch int64
	// failsOver is set while the sentinel fails the primary over.
	failsOver bool
	// marks identify the primary; empty if they are unknown.
	marks []string
	Err   error
	took  time.Duration
}

// answer returns the reply as the answer of a source.
func (a *SentinelReply) answer(source int) *answer {
	return &answer{source: source, marks: a.marks, servers: slices.Concat([]string{a.Primary}, a.Replicas, a.Down)}
}

// isLater reports whether an answer knows more of failovers than another one.
func (a *SentinelReply) isLater(than *SentinelReply) bool {
	switch {
	case than.Primary == "" || a.epoch != than.epoch:
		return than.Primary == "" || a.epoch > than.epoch
	default:
		return than.failsOver && !a.failsOver
	}
}

// Find returns the servers after the latest failover.
func (s *Sentinel) Find(ctx context.Context) (found Found, err error) {
	now := time.Now()
	hoped := s.hope.within(searchReplies*findTimeout, s.opts.SearchTimeout())
	wait := hoped
	if owesTime(s.sources, s.patient, now) {
		wait, s.patient = max(wait, min(s.opts.SearchTimeout(), mostPatience)), now
	}
	asking, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	replies := s.AskAll(asking)
	// A sentinel that is silent must leave time to ask the primaries.
	identifying, cancel := context.WithTimeout(ctx, s.opts.SearchTimeout())
	defer cancel()
	latest, sources, err := s.Judge(identifying, replies, now)
	if !s.belief.isSet && 2*len(s.decided.group) <= len(replies) && wait < s.opts.SearchTimeout() {
		// A foreign one that is near must not be heard alone.
		hoped = s.opts.SearchTimeout()
		replies = s.AskAll(identifying)
		latest, sources, err = s.Judge(identifying, replies, now)
	}
	found.Sources = sources
	n, took := alike(replies, &latest)
	// The others are no majority, without which there is no failover.
	s.hope = s.hope.after(hoped, took, err == nil && 2*n >= len(replies))
	if err == nil {
		err = s.history.follow(latest.epoch, true, now)
	}
	if err != nil {
		return found, fmt.Errorf("ask the sentinels for %s: %w", s.opts.Sentinel.Master, err)
	}
	s.belief.follow(latest.answer(-1), &s.decided)
	latest.addOthers(s.believed)
	found.Roles, found.Replaced = []Roles{latest.Roles}, s.decided.replaces
	return found, nil
}

// Judge returns the answer to follow, and the sentinels as they last answered. Where answers differ, it asks the primaries
// who they are.
func (s *Sentinel) Judge(ctx context.Context, replies []SentinelReply, now time.Time) (latest SentinelReply, sources []Source, err error) {
	s.identify(ctx, replies)
	s.mu.Lock()
	if s.belief.isSet && len(s.belief.followed.servers) > 0 && s.belief.followed.servers[0] == s.metAt {
		s.belief.followed.marks = appendNew(s.belief.followed.marks, s.met...)
	}
	s.mu.Unlock()
	var answers []answer
	var places []int
	for i := range replies {
		if replies[i].Err == nil {
			answers, places = append(answers, *replies[i].answer(i)), append(places, i)
		}
	}
	s.decided = s.belief.judge(answers, len(replies), now)
	if s.decided.replaces {
		s.history = history{}
	}
	s.believed = nil
	for _, n := range s.decided.group {
		s.believed = append(s.believed, replies[places[n]])
	}
	for i, addr := range s.opts.Sentinel.Addrs {
		source := Source{Addr: addr}
		if replies[i].Err != nil {
			source = sourceAt(s.sources, addr).miss(replies[i].Err, now, s.patient.Equal(now))
		} else if slices.Contains(s.decided.foreign, slices.Index(places, i)) {
			source.IsForeign, source.Leads = true, replies[i].Primary
		}
		sources = append(sources, source)
	}
	s.sources = sources
	if len(s.believed) > 0 {
		latest, err = s.Latest(s.believed)
		return latest, sources, err
	}
	if _, err = s.Latest(replies); err == nil {
		err = errElsewhere
	}
	return SentinelReply{}, sources, err
}

// addOthers adds the servers that only other replies list: a sentinel that was reset knows none. One that is new may be
// known to others first.
func (r *Roles) addOthers(replies []SentinelReply) {
	known := map[string]bool{r.Primary: true}
	for _, addr := range slices.Concat(r.Replicas, r.Down) {
		known[addr] = true
	}
	add := func(to *[]string, addrs []string) {
		for _, addr := range addrs {
			if !known[addr] {
				*to, known[addr] = append(*to, addr), true
			}
		}
	}
	for i := range replies {
		add(&r.Elsewhere, replies[i].Replicas)
	}
	for i := range replies {
		add(&r.Down, replies[i].Down)
	}
}

// meet notes the marks of the primary at an address. They change when it restarts, and when its replicas take over.
func (s *Sentinel) meet(addr string, marks []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metAt, s.met = addr, marks
}

// identify adds the marks of the primaries to the replies, if the replies name different primaries, or only one that is
// not followed. The primary followed is not asked: it may be dead. A primary that answers, or a silent foreign one, is
// asked again only after FollowAfter, because it receives the password and may be a stranger's.
func (s *Sentinel) identify(ctx context.Context, replies []SentinelReply) {
	marks := map[string][]string{}
	for i := range replies {
		if replies[i].Err == nil {
			marks[replies[i].Primary] = nil
		}
	}
	var followed string
	if s.belief.isSet {
		followed = s.belief.followed.servers[0]
	} else if len(marks) == 1 {
		return
	}
	maps.DeleteFunc(s.asked, func(_ string, a asked) bool { return time.Since(a.at) >= FollowAfter })
	var due []string
	for addr := range marks {
		if was, isKnown := s.asked[addr]; addr == followed {
			marks[addr] = s.belief.followed.marks
		} else if isKnown {
			marks[addr] = was.marks
		} else {
			due = append(due, addr)
		}
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	for _, addr := range due {
		all.Go(func() {
			_ = contain.Run(func() error {
				o := clientOptions(addr, s.opts)
				o.DB, o.PoolSize, o.MaxActiveConns = 0, 1, 1
				client := goredis.NewClient(o)
				defer closeWith(ctx, client)()
				text, err := client.Info(ctx).Result()
				mu.Lock()
				defer mu.Unlock()
				marks[addr] = MarksIn(fieldsOf(text))
				if err == nil || IsReply(err) || slices.ContainsFunc(s.sources, func(source Source) bool { return source.Leads == addr }) {
					s.asked[addr] = asked{marks[addr], time.Now()}
				}
				return err
			})
		})
	}
	all.Wait()
	for i := range replies {
		replies[i].marks = marks[replies[i].Primary]
	}
}

// MarksIn returns the IDs by which a server is known, as INFO has them: of its process, and of its replication history.
func MarksIn(field func(name string) string) (marks []string) {
	for _, name := range []string{"run_id", "master_replid", "master_replid2"} {
		if id := field(name); strings.Trim(id, "0") != "" {
			marks = append(marks, id)
		}
	}
	return marks
}

// AskAll asks the sentinels at the same time; the answers are in their order.
func (s *Sentinel) AskAll(ctx context.Context) []SentinelReply {
	answers := make([]SentinelReply, len(s.clients))
	var all sync.WaitGroup
	began := time.Now()
	for i, client := range s.clients {
		all.Go(func() {
			err := contain.Run(func() error {
				answers[i] = s.ask(ctx, client, s.opts.Sentinel.Addrs[i])
				answers[i].took = time.Since(began)
				return nil
			})
			if err != nil {
				answers[i] = SentinelReply{Err: err}
			}
			if err != nil || s.opts.hasMoved(ctx, s.opts.Sentinel.Addrs[i]) {
				// Its connection may be within a reply, or lead to a server that its name has left.
				_ = client.Close()
				s.clients[i] = s.connect(i)
			}
		})
	}
	all.Wait()
	return answers
}

// Latest returns the answer that knows of the latest failover, or the errors of all sentinels if there is none. Of
// answers that know the same, those of most sentinels count.
func (s *Sentinel) Latest(answers []SentinelReply) (latest SentinelReply, err error) {
	var failures []error
	for i, a := range answers {
		switch {
		case a.Err != nil:
			failures = append(failures, fmt.Errorf("%s: %w", s.opts.Sentinel.Addrs[i], a.Err))
		case a.isLater(&latest), !latest.isLater(&a) && moreAlike(answers, &a, &latest):
			latest = a
		}
	}
	if latest.Primary == "" {
		return SentinelReply{}, errors.Join(failures...)
	}
	return latest, nil
}

// alike returns how many answers know the same as one, and name its primary, and how long the last of them took.
func alike(answers []SentinelReply, one *SentinelReply) (n int, took time.Duration) {
	for i := range answers {
		if a := &answers[i]; a.Err == nil && a.Primary == one.Primary && a.epoch == one.epoch && a.failsOver == one.failsOver {
			n, took = n+1, max(took, a.took)
		}
	}
	return n, took
}

func moreAlike(answers []SentinelReply, one, other *SentinelReply) bool {
	n, _ := alike(answers, one)
	m, _ := alike(answers, other)
	return n > m
}

func (s *Sentinel) ask(ctx context.Context, client *goredis.SentinelClient, addr string) (a SentinelReply) {
	master, err := client.Master(ctx, s.opts.Sentinel.Master).Result()
	if err != nil {
		return SentinelReply{Err: s.faultOf(ctx, err, client, addr)}
	}
	if a.epoch, err = strconv.ParseInt(master["config-epoch"], 10, 64); err != nil {
		return SentinelReply{Err: fmt.Errorf("config-epoch: %w", err)}
	}
	a.failsOver = hasFlag(master["flags"], "failover_in_progress")
	// Until a failover has ended, MASTER has the new epoch, and the old address.
	primary, err := client.GetMasterAddrByName(ctx, s.opts.Sentinel.Master).Result()
	if err != nil {
		return SentinelReply{Err: err}
	}
	if len(primary) != 2 || primary[0] == "" || primary[1] == "" {
		return SentinelReply{Err: fmt.Errorf("no address of %s in its answer", s.opts.Sentinel.Master)}
	}
	a.Primary = net.JoinHostPort(primary[0], primary[1])
	replicas, err := client.Replicas(ctx, s.opts.Sentinel.Master).Result()
	if err != nil {
		return SentinelReply{Err: err}
	}
	for _, replica := range replicas {
		switch addr := addrIn(replica); {
		case addr == "" || addr == a.Primary:
		case isDownBySentinel(replica["flags"]):
			a.Down = append(a.Down, addr)
		default:
			a.Replicas = append(a.Replicas, addr)
		}
	}
	return a
}

// faultOf returns the fault of the setup that a refusal shows, or the refusal.
func (s *Sentinel) faultOf(ctx context.Context, err error, client *goredis.SentinelClient, addr string) error {
	if IsReply(err) && strings.Contains(err.Error(), "No such master") {
		return &Fault{Code: "not_found", Problem: "it watches no primary under the name " + s.opts.Sentinel.Master, Remedy: "write a name in the option sentinel that SENTINEL MASTERS lists", Cause: err}
	}
	return s.kinds.faultOf(ctx, err, addr, s.opts, client.Process)
}

func addrIn(server map[string]string) string {
	if server["ip"] == "" || server["port"] == "" {
		return ""
	}
	return net.JoinHostPort(server["ip"], server["port"])
}

// isDownBySentinel reports whether flags describe a server that cannot answer.
func isDownBySentinel(flags string) bool {
	return hasFlag(flags, "s_down") || hasFlag(flags, "o_down") || hasFlag(flags, "disconnected")
}

func hasFlag(flags, flag string) bool { return slices.Contains(strings.Split(flags, ","), flag) }

// Close closes the connections.
func (s *Sentinel) Close() {
	for _, client := range s.clients {
		_ = client.Close()
	}
}
