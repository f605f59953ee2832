/* How Caddys charge one bucket of a fixed window: two processes with ledgers, a
 * primary, and a replica that lags. Charges are plain commands (HINCRBY with HMGET)
 * where a process knows an open window, and the script otherwise; charges may be
 * held and sent as one. A check opens a window by plain commands (HSETNX, PEXPIRE NX,
 * HMGET) where its process knows none, or by the script. What can go wrong: a bucket vanishes (its operator, an
 * eviction, a FLUSHALL), the primary fails over to a replica that lacks the tail,
 * a message or a reply is lost, and a process crashes. A command may take any time
 * while its process waits for the reply; none runs after its process has given up.
 *
 * A process that is the sole writer admits without a check while the request fits,
 * for any time, which is more than the ledger does (ledger_trust, and half of the
 * limit has to be left). With AGES its answer grows old at any time, and then admits
 * one request more (a returning client). With RESETS a process resets the bucket for its
 * operator, and may take other steps between those of the reset.
 *
 * Not modelled: takes (`charge before`), which are one step at the primary; messages that
 * arrive after their sender has given up or crashed; refused repairs of an orphan; resets
 * together with other faults; windows that a reset does not rename (aligned ones); and
 * the end of a config's use of the ledger.
 *
 * Every `assert` is a promise:
 *  - No charge counts twice. None is lost except by a crash, a lost message, a failover
 *    or a reset; so not one that a promoted replica counts in a window that was over.
 *  - No process admits more than the limit in a window, which is counted anew when the
 *    bucket is emptied or fails over and when the process's own reset ends, and without
 *    the charges of lost messages. Of the documented bound of `charge after` this is one
 *    Caddy's part and the one request below; what others have in flight, or what is not
 *    at the replica yet, is not bounded here.
 *  - A window has one reset.
 *  - A bucket with a window expires, unless the connection was cut amid the commands that
 *    opened it.
 *  - A plain charge makes an orphan only where a bucket was lost, and no orphan stays once
 *    a process touches its bucket, unless that process crashes or loses the reply.
 *  - Where answers grow old, a process admits without a check only if its last charge
 *    found no other writer, and at most one request in a window whose limit others have
 *    used up.
 *  - A process that asks after its own reset is not refused by a count from before it, nor
 *    one that asks after a lost message by what that may have charged, before the primary
 *    has answered.
 *
 * `make model` checks all interleavings within the bounds in scripts/model.sh, and that
 * each of twenty BREAKs, a rule left out on purpose, violates the promise that is named
 * there: two requests of each process with a limit of one or two while one window ends,
 * and with one vanished bucket, failover, lost message, crash or reset (with a reset and
 * a limit of two no window ends); two windows with a limit of one and a vanished bucket;
 * a vanished bucket together with a crash; three requests each, with a limit of two,
 * without faults while one window ends, and with a failover or a lost message while none
 * does; AGES with a limit of three and three requests each in one window.
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
#ifndef CUTS
#define CUTS 0
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

byte ticks = TICKS, vanishings = VANISHINGS, failovers = FAILOVERS, losses = LOSSES, crashes = CRASHES, cuts = CUTS;

/* Ghosts. announced is the reset that some reply told; forgotten is set when a
 * bucket was lost, so that its window may begin anew. */
byte announced = 0;
bool forgotten = false;
/* excused is set while an orphan may stay, until anything touches the bucket: the
 * process that was to mend it crashed or lost the reply, or a failover brought it back. */
bool excused = false;
/* endless is set once a bucket may have a window and no expiry. */
bool endless = false;
/* The number of processes at rest. */
byte resting = 0;

/* The messages of a process: at most one charge in flight. */
mtype = { none, plain, script, mend, plainReply, scriptReply };

typedef Process {
	byte todo;		/* requests to come */
	byte flight;		/* admitted and not settled */
	byte waiting;		/* settled and not sent: held charges */
	byte sent;		/* charges in flight */
	byte base, baseReset;	/* what was known of the bucket when they left */
	mtype message;
	byte replyCount, replyReset;
	byte sentAt;		/* when the plain charge in flight was sent */
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
	bool aged, used;	/* the last answer is older than ledger_trust; a request relied on it */
	/* Ghosts: admitted by it in this window, though the primary was full; the last
	 * charge found what others had spent and this process did not know. */
	byte wrong;
	bool found, shared;
#endif
#if LOSSES
	byte loose;		/* charges of unknown outcome that count in no window known to be open */
	/* Ghosts: a charge of unknown outcome counts, and did when the check was sent. */
	bool suspects, asksSuspecting;
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
/* The plain charge in flight counted in a window that was over when it was sent, as on
 * a promoted replica with an old copy: it counted for nothing. */
#define wasOver (me.replyReset != 0 && endOf(me.replyReset) <= me.sentAt)
#ifdef BREAK_TOUCH
/* Only the process that made an orphan mends it. */
#define isOrphan (me.replyReset == 0 && me.replyCount == me.sent)
#else
#define isOrphan (me.replyReset == 0)
#endif
/* A process is about to mend an orphan. */
#define mends(j) (p[j].message == mend || p[j].message == plainReply && p[j].replyReset == 0)

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
 * orphan, where there is none. A window that was known to be open when the charge was
 * sent is gone only if it was lost, or has expired since. */
inline runPlain(n) {
	assert(primary.exists || forgotten || me.sentAt < now);
	excused = false;
	primary.exists = true;
	primary.count = primary.count + n;
	primary.spent = primary.spent + n
}

/* The script. It opens a window where none is open, and adopts an orphan: what was
 * counted there stays. */
inline runScript(n) {
	excused = false;
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
	assert(primary.reset != 0 && (primary.expires || endless));
	assert(primary.count == primary.spent);
	announced = primary.reset
}

/* HSETNX key r, by an estimate of the time. Windows that may be over when the command runs are
 * opened by the script. */
inline setWindow(at) {
	if
#ifdef BREAK_SETNX
	:: true ->
#else
	:: !primary.exists || primary.reset == 0 ->
#endif
		assert(!isOpen(announced) || forgotten);
		excused = false;
		primary.exists = true;
		primary.reset = nameOf(at + 1);
		if
		:: isOpen(primary.reset) -> forgotten = false
		:: else -> skip
		fi
#ifndef BREAK_SETNX
	:: else -> skip
#endif
	fi
}

/* The whole opening. Where an old window is there, the script follows. */
inline openWindow(at) {
	setWindow(at);
	primary.expires = true;
	if
	:: isOpen(primary.reset) -> announced = primary.reset
	:: else -> runScript(0)
	fi
}

/* askByOpening is a check that opens a window, by an estimate of the time. */
inline askByOpening(at) {
	openWindow(at);
	noteAsk();
	me.byPrimary = true; me.overlaps = (me.sent > 0);
	me.answerCount = primary.count; me.answerReset = primary.reset
}

/* pay notes that the charge in flight counts: once. */
inline pay() {
	assert(me.owed >= me.sent);
	me.owed = me.owed - me.sent
}

/* find compares what the charge in flight finds with what was known when it was sent. */
inline find() {
#ifdef AGES
	me.found = (primary.count != me.base)
#else
	skip
#endif
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

/* The charges in flight count in the window that is known to be open: what was heard
 * since they left may count them already, so the higher count counts. Where the window
 * is another, both count; a request that waits in the ledger for the reply is refused. */
#define counts (me.sent > 0 && me.baseReset == me.reset && isOpen(me.reset))
#define withSent (counts && me.base + me.sent > me.count -> me.base + me.sent : inWindow + (counts -> 0 : me.sent))

#if LOSSES
#define loosely me.loose
#else
#define loosely 0
#endif

#ifdef BREAK_HELD
#define ahead (me.flight + loosely)
#else
#ifdef BREAK_FLIGHT
#define ahead (me.waiting + loosely)
#else
#ifdef BREAK_LOOSE
#define ahead (me.flight + me.waiting)
#else
#define ahead (me.flight + me.waiting + loosely)
#endif
#endif
#endif

#define fits (withSent + ahead + 1 <= LIMIT)

inline admit() {
	me.todo--;
	me.flight++;
	me.admitted++;
	/* No process admits more than the limit in one window. */
	assert(me.admitted <= LIMIT)
}

#ifdef AGES
/* rely admits by the last answer. An old one is used up: the charge of this request has
 * to bring the truth. */
inline rely() {
	/* The last charge showed no other writer. */
	assert(!me.shared);
	if
	:: me.aged ->
		if
		:: primary.count + ahead + me.sent > LIMIT ->
			me.wrong++;
			/* Others have filled the bucket meanwhile: one request more. */
			assert(me.wrong <= 1)
		:: else -> skip
		fi;
#ifndef BREAK_USED
		me.used = true
#endif
	:: else -> skip
	fi
}
#define isUsed (me.aged && me.used)
#define trust() me.aged = false; me.used = false
#else
#define rely() skip
#define isUsed false
#define trust() skip
#endif

/* This rule bounds how often an old answer is used, and of which buckets. Only AGES
 * asserts that: no other promise rests on it. */
#ifdef BREAK_SOLE
#define isSole true
#else
#define isSole me.sole
#endif

/* hear replaces what is known by the primary's answer. */
inline hear(newCount, newReset) {
	me.count = newCount; me.reset = newReset; me.doubted = false;
#if LOSSES
	me.suspects = false; me.loose = 0;
#endif
	trust()
}

inline confirm() {
	if
	:: isStale -> me.doubted = true
	:: else ->
		me.sole = (me.replyReset == me.reset && me.replyCount == me.base + me.sent);
		hear(me.replyCount, me.replyReset);
#ifdef AGES
		me.shared = me.found
#endif
	fi;
#if RESETS
	me.stale = false;
#endif
	me.overlaps = me.asks;
	me.sent = 0; me.base = 0; me.baseReset = 0; me.message = none; me.sentAt = 0;
	me.replyCount = 0; me.replyReset = 0
}

/* suspect counts a charge of unknown outcome until the primary answers. */
inline suspect() {
#if LOSSES
	if
	:: counts -> me.count = withSent
	:: else -> me.loose = me.loose + me.sent
	fi;
#endif
	me.sole = false; me.overlaps = me.asks;
#ifndef BREAK_DOUBT
	me.doubted = true;
#endif
#if LOSSES
	me.suspects = true;
#endif
	me.sent = 0; me.base = 0; me.baseReset = 0; me.message = none; me.sentAt = 0;
	me.replyCount = 0; me.replyReset = 0
}

/* lose reports a charge that did not run. Its requests no longer count against the limit. */
inline lose() {
	me.owed = me.owed - me.sent;
	me.admitted = (me.admitted > me.sent -> me.admitted - me.sent : 0)
}

/* abandon ends the mending that the process was about to do. */
inline abandon() {
	excused = excused || mends(i) && !mends(1 - i)
}

/* crash forgets everything; the process that takes its place knows nothing. */
inline crash() {
	crashes--;
	abandon();
	/* What was not executed is lost. */
	me.owed = 0; me.replyCount = 0; me.replyReset = 0; me.answerCount = 0; me.answerReset = 0;
	me.byPrimary = false; me.overlaps = false;
	me.flight = 0; me.waiting = 0; me.sent = 0; me.base = 0; me.baseReset = 0; me.message = none; me.sentAt = 0;
	me.count = 0; me.reset = 0; me.sole = false; me.doubted = false;
	me.asks = false; me.admitted = 0;
#ifdef AGES
	me.wrong = 0; me.found = false; me.shared = false;
#endif
#if LOSSES
	me.suspects = false; me.asksSuspecting = false; me.loose = 0;
#endif
	trust()
}

#if RESETS
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
	me.overlaps = me.asks; me.answerCount = 0; me.answerReset = 0;
#endif
#ifndef BREAK_LAG
	me.doubted = true
#endif
}
#endif

/* noteAsk sets the ghosts of a check that is sent. */
inline noteAsk() {
#if RESETS
	me.asksSince = (me.since > 0);
#endif
#if LOSSES
	me.asksSuspecting = me.suspects;
#endif
	me.asks = true
}

inline refuse() {
	me.todo--;
#if RESETS
	/* A process whose check was sent after its own reset is not refused by a count
	 * from before it. */
	assert(!me.asksSince || !isOpen(me.reset) || me.count == 0 || me.reset % 4 >= me.since);
#endif
#if LOSSES
	/* Nor is one by a charge of unknown outcome, unless the primary was asked since. */
	assert(!me.asksSuspecting || me.byPrimary);
#endif
	skip
}

/* endAsk forgets the check. */
inline endAsk() {
#if RESETS
	me.asksSince = false;
#endif
#if LOSSES
	me.asksSuspecting = false;
#endif
	me.answerCount = 0; me.answerReset = 0; me.byPrimary = false; me.overlaps = false
}

proctype Caddy(byte i) {
	me.todo = REQUESTS;
	me.message = none;
	do
	/* A request is admitted without a check. */
	:: d_step { me.todo > 0 && !me.asks && isSole && !isUsed && !me.doubted && isOpen(me.reset) && fits ->
		admit(); rely() }
#ifdef AGES
	:: d_step { me.sole && !me.aged -> me.aged = true }
#endif

	/* A request asks the replica, or the primary, which opens a window. */
	:: d_step { me.todo > 0 && !me.asks && !me.doubted && replica.exists && isOpen(replica.reset) ->
		noteAsk();
		me.byPrimary = false; me.overlaps = true;
		me.answerCount = replica.count; me.answerReset = replica.reset }
	:: d_step { me.todo > 0 && !me.asks ->
		runScript(0);
		noteAsk();
		me.byPrimary = true; me.overlaps = (me.sent > 0);
		me.answerCount = primary.count; me.answerReset = primary.reset }

	:: d_step { me.todo > 0 && !me.asks && !isOpen(me.reset) -> askByOpening(now) }
#ifdef BREAK_SHORT
	/* The window is shorter than the way of the command, and over when it is set: an orphan
	 * that gets it is lost. */
	:: d_step { me.todo > 0 && !me.asks && !isOpen(me.reset) && now > 1 -> askByOpening(now - 1) }
#endif
	/* The connection is cut after the first command; the process asks again. */
	:: d_step { cuts > 0 && me.todo > 0 && !me.asks && !isOpen(me.reset) ->
		cuts--; endless = true; setWindow(now) }

	/* The answer arrives, now or later. */
	:: d_step { me.asks ->
		me.asks = false;
		if
#ifdef BREAK_OVERLAP
		:: me.byPrimary ->
#else
		:: me.byPrimary && !me.overlaps && me.sent == 0 ->
#endif
			hear(me.answerCount, me.answerReset)
		:: else -> raise(me.answerCount, me.answerReset)
		fi;
		if
		:: fits -> admit()
		:: else -> refuse()
		fi;
		endAsk() }

	/* A response ends, and its request is charged: held, for others to join. The ledger
	 * adds up several requests only of a bucket whose sole writer it is, so that other
	 * processes see charges earlier: no promise here rests on that rule. */
	:: d_step { me.flight > 0 ->
		me.flight--; me.waiting++; me.owed++ }

	/* Charges leave together. */
	:: d_step { me.waiting > 0 && me.message == none ->
		me.sent = me.waiting; me.waiting = 0;
		me.base = me.count; me.baseReset = me.reset;
		if
#ifdef BREAK_OPEN
		:: true ->
#else
		:: isOpen(me.reset) && !me.doubted ->
#endif
			me.message = plain; me.sentAt = now
		:: else -> me.message = script
		fi }

	/* The server runs them, at any later time. */
	:: d_step { me.message == plain ->
		find();
		runPlain(me.sent);
		me.replyCount = primary.count; me.replyReset = primary.reset;
		if
		:: wasOver -> skip
		:: else -> pay()
		fi;
		me.message = plainReply }
	:: d_step { me.message == script ->
		find();
		runScript(me.sent);
		pay();
		me.replyCount = primary.count; me.replyReset = primary.reset;
		me.message = scriptReply }
	:: d_step { me.message == mend ->
		runScript(0);
		me.replyCount = primary.count; me.replyReset = primary.reset;
		me.message = scriptReply }

	/* The reply shows whether the bucket was what the process thought. In an orphan the
	 * charge counts already; in a window that was over it is made again. */
	:: d_step { me.message == plainReply ->
		if
#ifndef BREAK_MEND
		:: isOrphan ->
#ifdef BREAK_TWICE
			me.message = script;
#else
			me.message = mend;
#endif
			me.sentAt = 0; me.replyCount = 0
#endif
#ifndef BREAK_OVER
		:: wasOver ->
			me.message = script;
			me.sentAt = 0; me.replyCount = 0; me.replyReset = 0
#endif
		:: else -> confirm()
		fi }
	:: d_step { me.message == scriptReply -> confirm() }

	/* A message or its reply is lost: nobody knows whether it ran. */
	:: d_step { losses > 0 && (me.message == plain || me.message == script) ->
		losses--; lose(); suspect() }
	:: d_step { losses > 0 && (me.message == plainReply || me.message == scriptReply || me.message == mend) ->
		losses--;
		if
		:: me.message == plainReply && wasOver -> lose()
		:: else -> skip
		fi;
		abandon();
#ifdef BREAK_REPEAT
		/* The charge is sent again. */
		me.message = script
#else
		suspect()
#endif
		}

	:: d_step { crashes > 0 && (me.flight > 0 || me.waiting > 0 || me.message != none) -> crash() }

#if RESETS
	/* A reset waits some time for charges in flight and empties the bucket. Then its
	 * reply arrives. */
	:: d_step { resets > 0 && me.todo > 0 && me.resetting == 0 -> resets--; me.resetting = 1 }
	:: d_step { me.resetting == 1 ->
		vanish(); forgotten = true; newWindow(); era++; me.resetting = 2 }
	:: d_step { me.resetting == 2 -> forget() }
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
	:: d_step { ticks > 0 -> ticks--; now++;
		if
		:: endOf(primary.reset) == now -> newWindow()
		:: else -> skip
		fi }
	/* Expiry cleans up, after the reset. */
	:: d_step { primary.exists && primary.expires && endOf(primary.reset) + 1 <= now -> vanish() }
	:: d_step { vanishings > 0 && primary.exists -> vanishings--; forgotten = true; newWindow(); vanish() }
	:: d_step { replica.count != primary.count || replica.reset != primary.reset || replica.exists != primary.exists ->
		replica.exists = primary.exists; replica.expires = primary.expires;
		replica.count = primary.count; replica.reset = primary.reset; replica.spent = primary.spent }
	:: d_step { failovers > 0 ->
		failovers--; forgotten = true; newWindow();
		primary.exists = replica.exists; primary.expires = replica.expires;
		primary.count = replica.count; primary.reset = replica.reset; primary.spent = replica.spent;
		excused = !mends(0) && !mends(1) }
	:: atomic { resting == PROCESSES ->
		/* No orphan stays once any process touches its bucket. */
		assert(!primary.exists || primary.reset != 0 || excused);
		break }
	od
}

init {
	atomic { run Caddy(0); run Caddy(1); run World() }
}
