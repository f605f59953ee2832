/* How Caddys charge one bucket of a fixed window: two processes with ledgers, a
 * primary, and a replica that lags. Charges are plain commands (HINCRBY with HMGET)
 * where a process knows an open window, and the script otherwise; charges may be
 * held and sent as one. What can go wrong: a bucket vanishes (its operator, an
 * eviction, a FLUSHALL), the primary fails over to a replica that lacks the tail,
 * a message or a reply is lost, and a process crashes. A command may take any time
 * while its process waits for the reply; none runs after its process has given up.
 *
 * A process that is the sole writer admits without a check while the request fits,
 * for any time, which is more than the ledger does (ledger_trust, and half of the
 * limit has to be left). With AGES its answer grows old at any time, and then admits
 * one request more (ledger_max_trust). With RESETS a process resets the bucket for its
 * operator, and may take other steps between those of the reset.
 *
 * Every `assert` is a promise. `make model` checks all interleavings within the
 * bounds below, and that each BREAK, a rule left out on purpose, violates one.
 */

#ifndef LIMIT
#define LIMIT 3
#endif
#ifndef REQUESTS
#define REQUESTS 3	/* of each process */
#endif
#ifndef TICKS
#define TICKS 2		/* of the clock; a window lasts one */
#endif
#define PROCESSES 2
/* How often each fault may happen. */
#ifndef VANISHINGS
#define VANISHINGS 0
#endif
#ifndef FAILOVERS
#define FAILOVERS 0
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef RESETS
#define RESETS 0
#endif

/* A bucket as a server has it. A window is named by the instant at which it ends;
 * 0 means that there is none. spent is a ghost: what count should be. */
typedef Bucket {
	bool exists;
	bool expires;
	byte count;
	byte reset;
	byte spent
}

Bucket primary, replica;

/* The primary's clock. Processes estimate it and are never ahead. */
byte now = 1;

byte ticks = TICKS, vanishings = VANISHINGS, failovers = FAILOVERS, losses = LOSSES, crashes = CRASHES;

/* Ghosts. announced is the reset that some reply told; forgotten is set when a
 * bucket was lost, so that its window may begin anew. */
byte announced = 0;
bool forgotten = false;
/* excused is set once an orphan may stay until the next touch: the process that
 * made it crashed, or lost the reply. */
bool excused = false;
/* The number of processes at rest. */
byte resting = 0;

/* The messages of a process: at most one charge in flight. */
mtype = { none, plain, script, mend, plainReply, scriptReply };

typedef Process {
	byte todo;		/* requests to come */
	byte flight;		/* admitted and not settled */
	byte waiting;		/* settled and not sent: held charges */
	byte sent;		/* charges in flight */
	mtype message;
	byte replyCount, replyReset;
	/* What is known of the bucket. */
	byte count, reset;
	bool sole, doubted;
	/* A check in flight: the answer, and whether charges were confirmed since. */
	bool asks, byPrimary, overlaps;
	byte answerCount, answerReset;
	/* Ghosts: charges that were settled and have neither run nor been reported lost;
	 * admissions in this window. */
	byte owed;
	byte admitted;
#ifdef AGES
	bool aged;		/* the last answer is older than ledger_trust */
	byte wrong;		/* admitted by it in this window, though the primary was full */
#endif
#if RESETS
	byte resetting;		/* 1: it has begun; 2: the bucket is empty */
	bool stale;		/* the charge in flight was sent before the reset ended */
	/* Ghosts: the era that its last reset began, and whether the check in flight was
	 * sent after that reset. */
	byte since;
	bool asksSince;
#endif
}

Process p[PROCESSES];

#if RESETS
/* Resets since the beginning. Windows before and after one have different names. */
byte resets = RESETS, era = 0;
#define nameOf(end) ((end) * 4 + era)
#define endOf(reset) ((reset) / 4)
#else
#define nameOf(end) (end)
#define endOf(reset) (reset)
#endif

#define me p[i]
#if RESETS
#define isResetting (me.resetting > 0)
#define isStale me.stale
#else
#define isResetting false
#define isStale false
#endif
#define isOpen(reset) (endOf(reset) > now)

/* ---- the primary ---- */

inline newWindow() {
	p[0].admitted = 0; p[1].admitted = 0;
#ifdef AGES
	p[0].wrong = 0; p[1].wrong = 0
#endif
}

inline vanish() {
	primary.exists = false; primary.expires = false;
	primary.count = 0; primary.reset = 0; primary.spent = 0
}

/* HINCRBY key c n; HMGET key r. It makes a bucket without reset and expiry, an
 * orphan, where there is none. */
inline runPlain(n) {
	primary.exists = true;
	primary.count = primary.count + n;
	primary.spent = primary.spent + n
}

/* The script. It opens a window where none is open, and adopts an orphan: what was
 * counted there stays. */
inline runScript(n) {
	if
	:: primary.exists && isOpen(primary.reset) ->
		primary.count = primary.count + n;
		primary.spent = primary.spent + n
	:: else ->
		assert(!isOpen(announced) || forgotten);
		if
		:: primary.exists && primary.reset == 0 ->
			/* The charges in an orphan are of the window that opens now. */
			primary.spent = primary.spent + n;
#ifdef BREAK_ADOPTION
			primary.count = n
#else
			primary.count = primary.count + n
#endif
		:: else ->
			primary.count = n;
			primary.spent = n
		fi;
		primary.exists = true; primary.expires = true;
		primary.reset = nameOf(now + 1);
		forgotten = false
	fi;
	assert(primary.reset != 0 && primary.expires);
	assert(primary.count == primary.spent);
	announced = primary.reset
}

/* ---- a process ---- */

/* raise takes in an answer that may be old: of one window the higher count, of two
 * windows the later one. */
inline raise(c, r) {
	if
#ifdef BREAK_RAISE
	:: true -> me.count = c; me.reset = r
#else
	:: r == me.reset && c > me.count -> me.count = c
	:: r > me.reset -> me.count = c; me.reset = r
#endif
	:: else -> skip
	fi
}

/* inWindow is what counts of the window that is open, as far as is known. */
#define inWindow (isOpen(me.reset) -> me.count : 0)

#ifdef BREAK_HELD
#define ahead (me.flight + me.sent)
#else
#ifdef BREAK_FLIGHT
#define ahead (me.waiting + me.sent)
#else
#define ahead (me.flight + me.waiting + me.sent)
#endif
#endif

#define fits (inWindow + ahead + 1 <= LIMIT)

inline admit() {
	me.todo--;
	me.flight++;
	me.admitted++;
	/* No process admits more than the limit in one window. */
	assert(me.admitted <= LIMIT)
}

/* useUp admits by an old answer: its own charge has to bring the truth. */
inline useUp() {
#ifdef AGES
	if
	:: me.aged ->
		if
		:: primary.count + ahead > LIMIT ->
			me.wrong++;
			/* Others have filled the bucket meanwhile: one request more. */
			assert(me.wrong <= 1)
		:: else -> skip
		fi;
#ifndef BREAK_USED
		me.sole = false; me.aged = false
#endif
	:: else -> skip
	fi
#else
	skip
#endif
}

inline confirm() {
#ifdef AGES
	me.aged = false;
#endif
	if
	:: isStale -> me.doubted = true
	:: else ->
		me.sole = (me.replyReset == me.reset && me.replyCount == me.count + me.sent);
		me.count = me.replyCount; me.reset = me.replyReset;
		me.doubted = false
	fi;
#if RESETS
	me.stale = false;
#endif
	me.overlaps = true;
	me.sent = 0; me.message = none;
	me.replyCount = 0; me.replyReset = 0
}

/* suspect counts a charge of unknown outcome until the primary answers. */
inline suspect() {
	me.count = me.count + me.sent;
	me.sole = false; me.doubted = true; me.overlaps = true;
	me.sent = 0; me.message = none;
	me.replyCount = 0; me.replyReset = 0
}

/* crash forgets everything; the process that takes its place knows nothing. */
inline crash() {
	crashes--;
	excused = true;
	/* What was not executed is lost. */
	me.owed = 0; me.replyCount = 0; me.replyReset = 0; me.answerCount = 0; me.answerReset = 0;
	me.byPrimary = false; me.overlaps = false;
	me.flight = 0; me.waiting = 0; me.sent = 0; me.message = none;
	me.count = 0; me.reset = 0; me.sole = false; me.doubted = false;
	me.asks = false; me.admitted = 0;
#ifdef AGES
	me.aged = false; me.wrong = 0
#endif
}

#if RESETS
#define noteAsk() me.asksSince = (me.since > 0)
/* A process whose check was sent after its own reset is not refused by a count from
 * before it. */
#define mayRefuse() assert(!me.asksSince || !isOpen(me.reset) || me.count == 0 || me.reset % 4 >= me.since)

/* forget ends a reset: the process drops what it knows of the bucket and the charges
 * that it holds. It will drop an answer in flight too, which may show the old bucket,
 * and a replica may show it for longer, so the next check asks the primary. */
inline forget() {
	me.resetting = 0; me.since = era;
	me.count = 0; me.reset = 0; me.sole = false;
	/* A request that ended since the bucket was emptied counts as one from before. */
	me.owed = me.owed - me.waiting; me.waiting = 0; me.admitted = 0;
#ifndef BREAK_REPLY
	me.stale = (me.message != none);
#endif
#ifndef BREAK_ANSWER
	me.overlaps = true; me.answerCount = 0; me.answerReset = 0;
#endif
	me.doubted = true
}
#else
#define noteAsk() skip
#define mayRefuse() skip
#endif

proctype Caddy(byte i) {
	me.todo = REQUESTS;
	me.message = none;
	do
	/* A request is admitted without a check. */
	:: atomic { me.todo > 0 && !me.asks && me.sole && !me.doubted && isOpen(me.reset) && fits ->
		admit(); useUp() }
#ifdef AGES
	:: atomic { me.sole && !me.aged -> me.aged = true }
#endif

	/* A request asks the replica, or the primary, which opens a window. */
	:: atomic { me.todo > 0 && !me.asks && !me.doubted && replica.exists && isOpen(replica.reset) ->
		noteAsk();
		me.asks = true; me.byPrimary = false; me.overlaps = true;
		me.answerCount = replica.count; me.answerReset = replica.reset }
	:: atomic { me.todo > 0 && !me.asks ->
		runScript(0);
		noteAsk();
		me.asks = true; me.byPrimary = true; me.overlaps = (me.sent > 0);
		me.answerCount = primary.count; me.answerReset = primary.reset }

	/* The answer arrives, now or later. */
	:: atomic { me.asks ->
		me.asks = false;
		if
		:: me.byPrimary && !me.overlaps && me.sent == 0 ->
			me.count = me.answerCount; me.reset = me.answerReset; me.doubted = false
		:: else -> raise(me.answerCount, me.answerReset)
		fi;
		if
		:: fits -> admit()
		:: else -> me.todo--; mayRefuse()
		fi;
		me.answerCount = 0; me.answerReset = 0; me.byPrimary = false }

	/* A response ends, and its request is charged: held, for others to join. */
	:: atomic { me.flight > 0 ->
		me.flight--; me.waiting++; me.owed++ }

	/* Charges leave together. */
	:: atomic { me.waiting > 0 && me.message == none ->
		me.sent = me.waiting; me.waiting = 0;
		if
		:: isOpen(me.reset) && !me.doubted -> me.message = plain
		:: else -> me.message = script
		fi }

	/* The server runs them, at any later time. */
	:: atomic { me.message == plain ->
		runPlain(me.sent);
		assert(me.owed >= me.sent);
		me.owed = me.owed - me.sent;
		me.replyCount = primary.count; me.replyReset = primary.reset;
		me.message = plainReply }
	:: atomic { me.message == script ->
		runScript(me.sent);
		assert(me.owed >= me.sent);
		me.owed = me.owed - me.sent;
		me.replyCount = primary.count; me.replyReset = primary.reset;
		me.message = scriptReply }
	:: atomic { me.message == mend ->
		runScript(0);
		me.replyCount = primary.count; me.replyReset = primary.reset;
		me.message = scriptReply }

	/* The reply shows whether the bucket was what the process thought. */
	:: atomic { me.message == plainReply ->
		if
#ifndef BREAK_MEND
		:: me.replyReset == 0 -> me.message = mend
#endif
		:: else -> confirm()
		fi }
	:: atomic { me.message == scriptReply -> confirm() }

	/* A message or its reply is lost: nobody knows whether it ran. */
	:: atomic { losses > 0 && (me.message == plain || me.message == script) ->
		losses--; me.owed = me.owed - me.sent; suspect() }
	:: atomic { losses > 0 && (me.message == plainReply || me.message == scriptReply || me.message == mend) ->
		losses--; excused = true;
#ifdef BREAK_REPEAT
		/* The charge is sent again. */
		me.message = script
#else
		suspect()
#endif
		}

	:: atomic { crashes > 0 && (me.flight > 0 || me.waiting > 0 || me.message != none) -> crash() }

#if RESETS
	/* A reset waits some time for charges in flight and empties the bucket. Then its
	 * reply arrives. */
	:: atomic { resets > 0 && me.todo > 0 && me.resetting == 0 -> resets--; me.resetting = 1 }
	:: atomic { me.resetting == 1 ->
		vanish(); forgotten = true; newWindow(); era++; me.resetting = 2 }
	:: atomic { me.resetting == 2 -> forget() }
#endif

	:: atomic { me.todo == 0 && me.flight == 0 && me.waiting == 0 && me.message == none && !me.asks && !isResetting ->
		/* Each charge ran once, or its loss is known. */
		assert(me.owed == 0);
		resting++;
		break }
	od
}

proctype World() {
	do
	:: atomic { ticks > 0 -> ticks--; now++;
		if
		:: endOf(primary.reset) == now -> newWindow()
		:: else -> skip
		fi }
	/* Expiry cleans up, after the reset. */
	:: atomic { primary.exists && primary.expires && endOf(primary.reset) + 1 <= now -> vanish() }
	:: atomic { vanishings > 0 && primary.exists -> vanishings--; forgotten = true; newWindow(); vanish() }
	:: atomic { replica.count != primary.count || replica.reset != primary.reset || replica.exists != primary.exists ->
		replica.exists = primary.exists; replica.expires = primary.expires;
		replica.count = primary.count; replica.reset = primary.reset; replica.spent = primary.spent }
	:: atomic { failovers > 0 ->
		failovers--; forgotten = true; newWindow();
		primary.exists = replica.exists; primary.expires = replica.expires;
		primary.count = replica.count; primary.reset = replica.reset; primary.spent = replica.spent }
	:: atomic { resting == PROCESSES ->
		/* No orphan stays, unless its maker crashed or lost the reply; whoever
		 * touches the bucket next adopts it. */
		assert(!primary.exists || primary.reset != 0 || excused);
		break }
	od
}

init {
	atomic { run Caddy(0); run Caddy(1); run World() }
}
