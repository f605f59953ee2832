// Package adminapi defines what the admin API below /rate_limit/ reads and answers,
// as it is written in JSON: [Status], [History], [Top] and [Tops], [Near] and [Nears],
// [Found] and [Matches], [Buckets] and [Resets], [Overrides], [SimulatedRequest] and [Simulation]. The API of
// internal/admin fills these types and the commands of internal/commands/cli read them, so
// that the two agree. [Check] is no answer of the API: the command check fills and prints
// it.
package adminapi

import (
	"cmp"
	"net/http"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Status describes the running config: GET /rate_limit/.
type Status struct {
	// Instances are the Caddys that the answer is about: one, unless answers of several were
	// added up.
	Instances []Instance `json:"instances"`
	// Problems are what is wrong with the stores, with keys and with the traffic of zones, worst
	// first. It is empty if all is well.
	Problems []Problem `json:"problems"`
	Zones    []Zone    `json:"zones"`
	Stores   []Store   `json:"stores"`
}

// Instance is a Caddy.
type Instance struct {
	// ID is that of its process.
	ID string `json:"id,omitempty"`
	// Name is that of its machine.
	Name string `json:"name"`
	// Address is that of its admin endpoint. A Caddy does not know by which address it was asked:
	// who asks several of them fills it in.
	Address string `json:"address,omitempty"`
	// Version is that of this module, "(devel)" in a build of a working copy, or empty if the
	// binary does not tell.
	Version string `json:"version"`
	// Uptime is how long the process has run, in seconds.
	Uptime float64 `json:"uptime"`
	// Error is why it is not part of the answer, if several were asked and it did not answer.
	Error string `json:"error,omitempty"`
	// Same is the other address of a Caddy that was asked at two.
	Same string `json:"same,omitempty"`
}

// ProblemKind is what sort of problem one is.
type ProblemKind string

// The kinds of problems.
const (
	// ProblemNoPrimary: a primary is away, or no server of a shard is known.
	ProblemNoPrimary ProblemKind = "no_primary"
	// ProblemStoreErrors: a shard does not answer, so that on_error decides, or charges are lost.
	ProblemStoreErrors ProblemKind = "store_errors"
	// ProblemChargesWait: charges wait for a shard.
	ProblemChargesWait ProblemKind = "charges_wait"
	// ProblemUnchecked: on_error lets requests pass.
	ProblemUnchecked ProblemKind = "unchecked"
	// ProblemNoReplica: a replica is not asked, or is gone.
	ProblemNoReplica ProblemKind = "no_replica"
	// ProblemNoQuorum: half or more of the given sentinels or nodes do not lead to the servers, and some are silent or refuse.
	ProblemNoQuorum ProblemKind = "no_quorum"
	// ProblemMisconfigured: a server is set up wrongly.
	ProblemMisconfigured ProblemKind = "misconfigured"
	// ProblemForeignServer: a given sentinel or node leads to unrelated servers.
	ProblemForeignServer ProblemKind = "foreign_server"
	// ProblemServerReplaced: a server has nothing in common with the one before it.
	ProblemServerReplaced ProblemKind = "server_replaced"
	// ProblemUnidentified: nothing shows whether a server is another one than before.
	ProblemUnidentified ProblemKind = "unidentified"
	// ProblemDisagreement: another Caddy has another config.
	ProblemDisagreement ProblemKind = "disagreement"
	// ProblemDamagedOverrides: what operators have set cannot all be read.
	ProblemDamagedOverrides ProblemKind = "damaged_overrides"
	// ProblemProxyAddress: clients behind a proxy that is not trusted share a bucket.
	ProblemProxyAddress ProblemKind = "proxy_address"
	// ProblemOneKey: nearly all requests have the same key.
	ProblemOneKey ProblemKind = "one_key"
	// ProblemEmptyKey: keys are often empty.
	ProblemEmptyKey ProblemKind = "empty_key"
	// ProblemEvicted: buckets in memory are forgotten although they count.
	ProblemEvicted ProblemKind = "evicted"
	// ProblemIdleZone: a zone decides about no request.
	ProblemIdleZone ProblemKind = "idle_zone"
	// ProblemClockJumped: a clock was set.
	ProblemClockJumped ProblemKind = "clock_jumped"
	// ProblemDoubtfulKey: a key may not tell clients apart.
	ProblemDoubtfulKey ProblemKind = "doubtful_key"
	// ProblemDoubtfulConfig: routes around a limiter make it ineffective.
	ProblemDoubtfulConfig ProblemKind = "doubtful_config"
	// ProblemMore stands for those that are not listed.
	ProblemMore ProblemKind = "more"
)

// ProblemKinds are all kinds, the worst first.
var ProblemKinds = []ProblemKind{
	ProblemNoPrimary, ProblemStoreErrors, ProblemChargesWait, ProblemUnchecked, ProblemNoReplica, ProblemNoQuorum, ProblemMisconfigured, ProblemForeignServer, ProblemServerReplaced, ProblemUnidentified,
	ProblemDisagreement, ProblemDamagedOverrides,
	ProblemProxyAddress, ProblemOneKey, ProblemEmptyKey, ProblemEvicted, ProblemIdleZone, ProblemClockJumped, ProblemDoubtfulKey, ProblemDoubtfulConfig, ProblemMore,
}

// Rank returns the place of the kind among all; the worst is 0.
func (k ProblemKind) Rank() int { return slices.Index(ProblemKinds, k) }

// Problem is something wrong with a shard, with one of its servers, or with the key or the
// traffic of a zone.
type Problem struct {
	// Kind is also a label of the metric caddy_rate_limit_problems.
	Kind  ProblemKind `json:"kind"`
	Store string      `json:"store"`
	Shard string      `json:"shard,omitempty"`
	Zone  string      `json:"zone,omitempty"`
	// Server is the address, if the problem is that of one server.
	Server string `json:"server,omitempty"`
	// Text is a sentence without a period, with the remedy if it is not plain.
	Text string `json:"text"`
	// Since is when it was found first, in seconds since the epoch.
	Since float64 `json:"since,omitempty"`
	// Addresses are the Caddys that it is a problem of, if several were asked.
	Addresses []string `json:"addresses,omitempty"`
}

// Client is a client key, and what it says by the templates of the zone's key in the
// running config.
type Client struct {
	// ClientKey is "base64:" and the encoded key if that is no text.
	ClientKey string `json:"client_key"`
	// Template is the text of the zone's key that yields the client key, as a Caddyfile
	// has it; it is empty if that is unknown. Values are those of its placeholders, each
	// once.
	Template string   `json:"template,omitempty"`
	Values   []string `json:"values,omitempty"`
	// Note says what the client key is if Template and Values do not say all of it.
	Note string `json:"note,omitempty"`
	// Unknown means that the running config cannot yield the client key, or not without
	// the client's own, so that nothing can be looked up by it.
	Unknown bool `json:"unknown,omitempty"`
}

// Zone is a zone in the store in which its handlers count.
type Zone struct {
	Name      string   `json:"name"`
	Store     string   `json:"store"`
	Rollout   *Rollout `json:"rollout,omitempty"`
	Algorithm string   `json:"algorithm"`
	Key       []string `json:"key"`
	// Events and Burst are numbers, or texts with placeholders.
	Events string `json:"events"`
	Burst  string `json:"burst,omitempty"`
	// Window is in seconds; of a calendar, that of the longest window.
	Window float64 `json:"window"`
	// Calendar is what the windows of a calendar are, such as "month in
	// Europe/Berlin".
	Calendar string `json:"calendar,omitempty"`
	Charge   string `json:"charge"`
	// Enforce is in percent.
	Enforce float64 `json:"enforce"`
	// Definition is a digest of what zones of one name have to have in common.
	Definition string `json:"definition"`
	// Rule is what operators have changed of the zone, in place of Events, Burst, Enforce and the
	// percentage of Rollout, which are those of the config.
	Rule *Override `json:"rule,omitempty"`
	// Decisions are counts by outcome.
	Decisions map[string]int64 `json:"decisions"`
	// LastRefused is when this process last refused a request there, or in the store of
	// the rollout, in seconds since the epoch; 0 if it refused none.
	LastRefused float64 `json:"last_refused,omitempty"`
	// Shares are the decisions of each Caddy, if several were asked.
	Shares []ZoneShare `json:"shares,omitempty"`
}

// ZoneShare is the part of one Caddy in the decisions of a zone.
type ZoneShare struct {
	Address   string           `json:"address"`
	Decisions map[string]int64 `json:"decisions"`
	// Rule is that of this Caddy, if each keeps its own and they differ.
	Rule *Override `json:"rule,omitempty"`
}

// Rollout names the store to which a share of the clients is moved.
type Rollout struct {
	Store   string  `json:"store"`
	Percent float64 `json:"percent"`
	// By names the zone that decides which requests move, or is empty if this zone does.
	By string `json:"by,omitempty"`
}

// Store is the state of a store. One that is not open has a name and a module
// only.
type Store struct {
	Name   string `json:"name"`
	Module string `json:"module,omitempty"`
	// Shared is set if other Caddys may count there too.
	Shared bool `json:"shared"`
	// Buckets is their number, of a store in memory.
	Buckets *int    `json:"buckets,omitempty"`
	Shards  []Shard `json:"shards,omitempty"`
	Ledger  *Ledger `json:"ledger,omitempty"`
}

// Shard is the state of a [store.ShardFigures].
type Shard struct {
	Name    string   `json:"name"`
	Kind    string   `json:"kind"`
	Retired bool     `json:"retired"`
	Found   bool     `json:"found"`
	Servers []Server `json:"servers"`
}

// Server is the state of a [store.ServerFigures]. The maps are by the purpose of a
// [store.LaneFigures].
type Server struct {
	Address  string             `json:"address"`
	Role     store.Role         `json:"role"`
	State    store.ServerState  `json:"state"`
	Breakers map[string]string  `json:"breakers"`
	Lag      *float64           `json:"lag_seconds,omitempty"`
	Latency  map[string]float64 `json:"latency_seconds"`
	Pools    map[string]Pool    `json:"pools"`
	Queued   int                `json:"queued"`
}

// Pool is a [store.PoolFigures].
type Pool struct {
	Connections int64 `json:"connections"`
	Idle        int64 `json:"idle"`
	Hits        int64 `json:"hits"`
	Misses      int64 `json:"misses"`
	Timeouts    int64 `json:"timeouts"`
	Stale       int64 `json:"stale"`
}

// Ledger is what this process knows of a store's buckets beyond their counts in
// the store.
type Ledger struct {
	Buckets           int64   `json:"buckets"`
	InFlight          int64   `json:"in_flight"`
	Unsent            int64   `json:"unsent"`
	Uncertain         int64   `json:"uncertain"`
	LocalRefusals     int64   `json:"local_refusals"`
	UnaskedAdmissions int64   `json:"unasked_admissions"`
	Batches           Batches `json:"batches"`
}

// Batches counts batches, and the events in them by what became of these.
type Batches struct {
	Fetched  int64 `json:"fetched"`
	Tokens   int64 `json:"tokens"`
	Returned int64 `json:"returned"`
	Expired  int64 `json:"expired"`
}

// Top lists the clients that a zone refused most: GET /rate_limit/top?zone=<zone>.
type Top struct {
	Zone string `json:"zone"`
	// Since is the time that the counts cover, in seconds.
	Since   float64         `json:"since"`
	Refused []RefusedClient `json:"refused"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// RefusedClient is how often a client was refused: a lower bound, but for a chance
// of one in billions.
type RefusedClient struct {
	Client
	Store string `json:"store"`
	Count int64  `json:"count"`
	// LastRefused is when, in seconds since the epoch; 0 if that was forgotten.
	LastRefused float64 `json:"last_refused,omitempty"`
	// Shares are the refusals by each Caddy, if several were asked.
	Shares []ClientShare `json:"shares,omitempty"`
}

// ClientShare is the part of one Caddy in the refusals of a client.
type ClientShare struct {
	Address string `json:"address"`
	Count   int64  `json:"count"`
}

// Tops has the [Top] of every zone, in alphabetical order: GET /rate_limit/top.
type Tops struct {
	Zones []Top `json:"zones"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// Near lists the clients that have used most of their limit in a zone, and not all of
// it: GET /rate_limit/near?zone=<zone>.
type Near struct {
	Zone string `json:"zone"`
	// Percent is how much of the limit is most of it: the zone's warn, or 80; the least of
	// those if the zone has several, in different stores.
	Percent int64 `json:"percent"`
	// Full is how many clients are at their limit.
	Full    int64        `json:"full"`
	Clients []NearClient `json:"clients"`
	// Unlisted are the stores that cannot list their buckets, so that their clients are
	// not known.
	Unlisted []string `json:"unlisted_stores,omitempty"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// NearClient is a client that is near its limit, as far as this process knows. Its
// client key is empty if only the beginning of it is known.
type NearClient struct {
	Client
	Store string  `json:"store"`
	Limit int64   `json:"limit"`
	Used  int64   `json:"used"`
	Reset float64 `json:"reset,omitempty"`
	// Address is the Caddy that counts the client in its own memory, if several were asked.
	Address string `json:"address,omitempty"`
	// Seen is what the Caddys for which the client is near its limit saw last, if several that share the
	// store were asked. How much each of them has admitted is not known: the store has one count.
	Seen []Sighting `json:"seen,omitempty"`
}

// Sighting is the count of a client in a shared store as one Caddy saw it last.
type Sighting struct {
	Address string `json:"address"`
	Used    int64  `json:"used"`
}

// Nears has the [Near] of every zone, in alphabetical order: GET /rate_limit/near.
type Nears struct {
	Zones []Near `json:"zones"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// Found lists the buckets of one client in every zone and store whose key fits, in
// alphabetical order of the zones: GET /rate_limit/clients.
type Found struct {
	Zones []Buckets `json:"zones"`
	// Errors are of the zones that could not be looked at.
	Errors []string `json:"errors,omitempty"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// Matches lists the clients that begin with a text, among those whose buckets this process remembers:
// GET /rate_limit/clients?prefix=<text>.
type Matches struct {
	Clients []Match `json:"clients"`
	// More means that there are more than are listed.
	More bool `json:"more,omitempty"`
	// Unlisted are the stores that cannot list their buckets.
	Unlisted []string `json:"unlisted_stores,omitempty"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// Match is a client of a zone, and its count as far as this process knows.
type Match struct {
	Zone string `json:"zone"`
	NearClient
}

// Compare orders matches by their values.
func (m *Match) Compare(other *Match) int {
	return cmp.Or(slices.Compare(m.Values, other.Values), strings.Compare(m.ClientKey, other.ClientKey),
		strings.Compare(m.Zone, other.Zone), strings.Compare(m.Store, other.Store))
}

// Buckets describes the buckets of a client: GET /rate_limit/buckets/<zone>.
type Buckets struct {
	Zone    string   `json:"zone"`
	Store   string   `json:"store"`
	Buckets []Bucket `json:"buckets"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// BucketName identifies a bucket of a zone: its client and, if the bucket was found by
// values, the text of the zone's key that yields it, as the config has it.
type BucketName struct {
	Client
	Text string `json:"text,omitempty"`
}

// Bucket is a client's bucket, wherever there are counts of it.
type Bucket struct {
	BucketName
	Copies
	// Previous has the copies of the shards that kept the bucket before the steps of a resharding.
	Previous *Copies `json:"former,omitempty"`
	// Local is the count that this process made while the store did not answer.
	Local *State `json:"local,omitempty"`
	// Ledger is what this process knows of the bucket beyond the store's count.
	Ledger *Account `json:"ledger,omitempty"`
	// Overrides are those of the client that are in force.
	Overrides []Override `json:"overrides,omitempty"`
	// LastRefused is when this process last refused the client, in seconds since the
	// epoch; 0 if it did not, or that was forgotten.
	LastRefused float64 `json:"last_refused,omitempty"`
}

// Copies are those of a bucket on the servers of a shard, or the one in memory.
type Copies struct {
	Shard   string `json:"shard,omitempty"`
	Servers []Copy `json:"servers"`
}

// Copy is the bucket on one server. State is nil if the server has none.
type Copy struct {
	Address string     `json:"address,omitempty"`
	Role    store.Role `json:"role"`
	State   *State     `json:"state"`
	Error   string     `json:"error,omitempty"`
}

// State is the state of a bucket. Instants are in seconds since the epoch. Limit is what holds now
// or, if that depends on the request, that of the last one that this process had. Without a limit, or
// if it is not known, Limit and Remaining are nil, and with gcra Used as well.
type State struct {
	Limit     *int64  `json:"limit"`
	Used      *int64  `json:"used"`
	Remaining *int64  `json:"remaining"`
	Reset     float64 `json:"reset,omitempty"`
	Penalty   float64 `json:"penalty,omitempty"`
}

// Account is a [store.Account].
type Account struct {
	Used     int64 `json:"used"`
	InFlight int64 `json:"in_flight"`
	Unsent   int64 `json:"unsent"`
	Reserved int64 `json:"reserved,omitempty"`
	Full     bool  `json:"full"`
	IsAlone  bool  `json:"alone,omitempty"`
}

// Resets lists buckets that were emptied: DELETE /rate_limit/buckets/<zone>.
type Resets struct {
	Zone    string  `json:"zone"`
	Store   string  `json:"store"`
	Buckets []Reset `json:"buckets"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// Reset is a bucket that was emptied. Deleted is set if there was one.
type Reset struct {
	BucketName
	Shard   string `json:"shard,omitempty"`
	Deleted bool   `json:"deleted"`
}

// Overrides lists what operators have changed for zones and clients: GET
// /rate_limit/overrides.
type Overrides struct {
	Overrides []Override `json:"overrides"`
	// Errors are of the stores whose overrides could not all be read.
	Errors []string `json:"errors,omitempty"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// Override is a [store.Override]. Instants are in seconds since the epoch; Until is 0 if it lasts until
// it is removed.
type Override struct {
	Kind  store.OverrideKind `json:"kind"`
	Zone  string             `json:"zone"`
	Store string             `json:"store"`
	// Client is empty for a zone.
	Client
	// Events are -1 for unlimited.
	Events  int64    `json:"events,omitempty"`
	Burst   int64    `json:"burst,omitempty"`
	Enforce *float64 `json:"enforce,omitempty"`
	Rollout *float64 `json:"rollout,omitempty"`
	Since   float64  `json:"since,omitempty"`
	Until   float64  `json:"until,omitempty"`
	// ReplacedUntil is when the override of the same kind would have ended that a new one
	// replaces; 0 if there was none, or it had no end.
	ReplacedUntil float64 `json:"replaced_until,omitempty"`
	// ReplacedDamaged is set if what it has replaced, or was removed, could not be read.
	ReplacedDamaged bool   `json:"replaced_damaged,omitempty"`
	Reason          string `json:"reason,omitempty"`
	By              string `json:"by,omitempty"`
	// Version may be sent with a change, which is then only made if the override is still this one.
	Version string `json:"version,omitempty"`
	// Warning names the shards that may lack a change, although it was made.
	Warning string `json:"warning,omitempty"`
	// Copies counts the shards and replicas that have a change; nil in lists, and where a store has no shards.
	Copies *store.Copies `json:"copies,omitempty"`
	// Addresses are the Caddys that have it so in their own memory, if several were asked and not all
	// have.
	Addresses []string `json:"addresses,omitempty"`
}

// ImportedOverrides are those to have: POST /rate_limit/overrides. Their since, by and version do not
// matter.
type ImportedOverrides struct {
	Overrides []Override `json:"overrides"`
}

// Imported is what an import changes.
type Imported struct {
	Changes []ImportedChange `json:"changes"`
	// Unchanged is how many overrides are as they should be, and Ended how many of the request have
	// ended by now.
	Unchanged int `json:"unchanged"`
	Ended     int `json:"ended,omitempty"`
	// Skipped are those of zones that the config does not have in that store, each with an Error.
	Skipped []ImportedChange `json:"skipped,omitempty"`
}

// ImportedChange is one change of an import: Before is nil if it adds one, After if it removes one.
type ImportedChange struct {
	Before *Override `json:"before,omitempty"`
	After  *Override `json:"after,omitempty"`
	// Error is why it was not made.
	Error string `json:"error,omitempty"`
	// Warning names the shards that may lack it, although it was made.
	Warning string `json:"warning,omitempty"`
}

// Audit lists the last changes of overrides, the latest first: GET /rate_limit/audit.
type Audit struct {
	Changes []AuditedChange `json:"changes"`
	// Errors are of the stores whose changes could not all be read.
	Errors []string `json:"errors,omitempty"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// AuditedChange is a change that was made. Before is nil if there was no override, After if it was
// removed.
type AuditedChange struct {
	// At is in seconds since the epoch.
	At     float64            `json:"at"`
	Store  string             `json:"store"`
	Zone   string             `json:"zone"`
	Kind   store.OverrideKind `json:"kind"`
	Client Client             `json:"client"`
	By     string             `json:"by,omitempty"`
	Reason string             `json:"reason,omitempty"`
	Before *Override          `json:"before,omitempty"`
	After  *Override          `json:"after,omitempty"`
}

// SimulatedRequest is the request to simulate: POST /rate_limit/simulate.
type SimulatedRequest struct {
	// Method is GET if it is empty.
	Method string `json:"method,omitempty"`
	// URL is a whole one, or a path if Caddy serves one site.
	URL     string      `json:"url"`
	Headers http.Header `json:"headers"`
	// RemoteAddr is an IP address with or without a port, 127.0.0.1 if it is empty.
	RemoteAddr string `json:"remote_addr,omitempty"`
	// Server is the name of a server of the HTTP app, if the URL does not name one.
	Server string `json:"server,omitempty"`
}

// Simulation is the foreseen outcome of a request.
type Simulation struct {
	// Decision is an outcome of package telemetry, of clients for which the limit is enforced.
	Decision string `json:"decision"`
	// Zone is the one that refuses, or that holds an allowed request.
	Zone string `json:"zone,omitempty"`
	// Wait is how many seconds a refused client has to wait, or an allowed request
	// is held.
	Wait float64 `json:"wait,omitempty"`
	// Zones are those that count the request, in the order in which it meets them.
	Zones []SimulatedZone `json:"zones"`
	// PassedOver are the modules of handlers before or between the zones that were
	// not run. They may answer a request or change it.
	PassedOver []string `json:"passed_over,omitempty"`
	// Error is why the request ends for another reason than a limit.
	Error string `json:"error,omitempty"`
}

// SimulatedZone is the answer of a zone to a simulated request.
type SimulatedZone struct {
	Name  string `json:"name"`
	Store string `json:"store"`
	Client
	Limit     int64   `json:"limit"`
	Used      int64   `json:"used"`
	Remaining int64   `json:"remaining"`
	Reset     float64 `json:"reset,omitempty"`
	Cost      int64   `json:"cost"`
	Allowed   bool    `json:"allowed"`
	Outcome   string  `json:"outcome"`
	Reason    string  `json:"reason"`
	Error     string  `json:"error"`
}

// Check is the report on the stores of a config.
type Check struct {
	// Result is error or warning if there is such a finding, and ok otherwise.
	Result string         `json:"result"`
	Stores []CheckedStore `json:"stores"`
	// Routes are the findings about the routes around limiters; their codes are those of the rules.
	Routes []store.Finding `json:"routes"`
}

// The results of a check.
const (
	CheckOK      = "ok"
	CheckWarning = "warning"
	CheckError   = "error"
)

// CheckedStore is the report on a store.
type CheckedStore struct {
	Name   string `json:"name"`
	Module string `json:"module,omitempty"`
	store.Diagnosis
}
