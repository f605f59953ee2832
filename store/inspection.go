package store

// Inspection shows where a bucket is kept, and with what content.
type Inspection struct {
	// Shard is the name of the shard that keeps the bucket; empty if the store
	// has none.
	Shard string
	// Copies are those of the servers, the primary first.
	Copies []Copy
	// Previous shows the shards that kept the bucket before each step of a resharding.
	Previous []Inspection
	// Account is what this process knows of the bucket, or nil.
	Account *Account
}

// Copy is a bucket as one server has it.
type Copy struct {
	// Address is the server's; empty for this process's memory.
	Address string
	Role    Role
	// Exists is set if there is something that counts.
	Exists bool
	// State is what it looks like, or the error of the server.
	State State
}

// Holds reports whether st shows a bucket of the limit in which something counts, or
// that has a window that was opened. An aligned one is open whether there is a bucket
// or not.
func (st *State) Holds(limit *Limit) bool {
	return st.Err == nil && (st.Used > 0 || st.Penalty > 0 || !limit.Align && st.Content != Content{})
}

// Account is what this process knows of a bucket beyond what the store says.
type Account struct {
	// Used is what has been spent, as far as is known.
	Used int64
	// InFlight is the cost of the requests that were admitted and are not
	// settled.
	InFlight int64
	// Unsent is the cost of the charges that wait to be sent.
	Unsent int64
	// Reserved is what is left of the events that were taken in advance.
	Reserved int64
	// Full is set if requests are refused without a call.
	Full bool
	// IsAlone is set if the process has decided without the store, and the store may lack some of those charges.
	IsAlone bool
}
