/* How Caddys take from one bucket of a fixed window (`charge before`): two processes
 * and a primary. Far from the limit, as far as it knows, a process takes by a plain
 * command (HINCRBY with HMGET) and looks at the reply; what went beyond the limit it
 * gives back, and asks the script, which decides by itself everywhere else. What can
 * go wrong: the bucket vanishes, the primary fails over to a copy that lacks the tail,
 * a message or a reply is lost, and a process crashes between its steps.
 *
 * Every `assert` is a promise. `make model` checks all interleavings within the
 * bounds below, and that each BREAK, a rule left out on purpose, violates one.
 */

#ifndef LIMIT
#define LIMIT 2
#endif
#ifndef REQUESTS
#define REQUESTS 3	/* of each process */
#endif
#ifndef TICKS
#define TICKS 1		/* of the clock; a window lasts one */
#endif
#define PROCESSES 2
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

/* The bucket at the primary, and the copy that a failover promotes. A window is named
 * by the instant at which it ends; 0 means that there is none. */
typedef Bucket {
	bool exists;
	byte count;
	byte reset
}

Bucket primary, copy;
byte now = 1;
byte ticks = TICKS, vanishings = VANISHINGS, failovers = FAILOVERS, losses = LOSSES, crashes = CRASHES;

/* Ghosts. admitted is what both processes admitted in the window that is open;
 * undue is what is in its count and was not admitted: in flight, to be given back, or
 * left by a crash or a loss. */
byte admitted = 0;
byte undue = 0;
/* kept is the part of undue that stays: a crash or a loss. */
byte kept = 0;
/* excused is set once a bucket was lost, so that its window may begin anew, or an
 * orphan may stay until the next touch. */
bool excused = false;
byte resting = 0;

/* What a process is about to do, and where its plain take left something. */
mtype = { idle, plain, plainReply, adopt, giveBack, script };

typedef Process {
	byte todo;
	mtype step;
	byte replyCount, replyReset;
	/* The window in which the plain take counts: a ghost. */
	byte spentIn;
	byte count, reset	/* what is known */
}

Process p[PROCESSES];

#define me p[i]
#define isOpen(r) (r > now)

inline newWindow() { admitted = 0; undue = 0; kept = 0 }

/* begin opens a window if none is open; an orphan's count stays. */
inline begin() {
	if
	:: primary.exists && isOpen(primary.reset) -> skip
	:: else ->
		if
		:: primary.exists && primary.reset == 0 -> skip
		:: else -> primary.count = 0; newWindow()
		fi;
		primary.exists = true; primary.reset = now + 1
	fi
}

inline learn() { me.count = primary.count; me.reset = primary.reset }

inline admit() {
	admitted++;
	/* All processes together admit no more than the limit, unless a bucket was lost. */
	assert(admitted <= LIMIT || excused);
	me.step = idle
}

/* refuse ends a request that the script refused: whatever the window has no room for
 * is admitted, or is another process's take that is about to be given back. */
inline refuse() {
	assert(admitted + undue >= LIMIT || excused);
	me.step = idle
}

#define mine (me.spentIn == primary.reset && me.spentIn != 0)

proctype Caddy(byte i) {
	me.todo = REQUESTS;
	me.step = idle;
	do
	:: atomic { me.todo > 0 && me.step == idle ->
		me.todo--;
		if
		:: isOpen(me.reset) && 2 * (LIMIT - me.count - 1) >= LIMIT -> me.step = plain
		:: else -> me.step = script
		fi }

	/* HINCRBY key c 1; HMGET key r. */
	:: atomic { me.step == plain ->
		if
		:: primary.exists && primary.reset != 0 && !isOpen(primary.reset) ->
			/* It counts in a window that is over. */
			me.replyCount = 0; me.replyReset = primary.reset; me.spentIn = 0
		:: else ->
			if
			:: !primary.exists -> primary.count = 0; primary.reset = 0; newWindow()
			:: else -> skip
			fi;
			primary.exists = true;
			primary.count++;
			undue++;
			me.replyCount = primary.count; me.replyReset = primary.reset; me.spentIn = primary.reset
		fi;
		me.step = plainReply }

	:: atomic { me.step == plainReply ->
		me.count = me.replyCount; me.reset = me.replyReset;
		if
		:: me.replyReset == 0 -> me.step = adopt
		:: me.replyReset != 0 && me.spentIn == 0 -> me.step = script
		:: me.replyReset != 0 && me.spentIn != 0 ->
			if
#ifndef BREAK_LIMIT
			:: me.replyCount > LIMIT ->
#ifdef BREAK_GIVEBACK
				me.step = script
#else
				me.step = giveBack
#endif
			:: else ->
#else
			:: true ->
#endif
				if
				:: mine -> undue--; admit()
				:: else -> me.step = idle	/* its window is over or lost */
				fi;
				me.spentIn = 0
			fi
		fi;
		me.replyCount = 0; me.replyReset = 0 }

	/* The script, with a cost of 0, gives the orphan a window. */
	:: atomic { me.step == adopt ->
		if
		:: primary.exists && primary.reset == 0 -> begin(); me.spentIn = primary.reset
		:: else ->
			/* Another process adopted it, or it is gone. */
			begin(); me.spentIn = primary.reset;
			if
			:: undue == 0 -> me.spentIn = 0
			:: else -> skip
			fi
		fi;
		learn();
		if
		:: me.spentIn == 0 -> me.step = idle; excused = true
		:: me.spentIn != 0 && primary.count > LIMIT -> me.step = giveBack
		:: else -> undue--; admit(); me.spentIn = 0
		fi }

	/* The script of a refund gives back in the window that it was spent in. */
	:: atomic { me.step == giveBack ->
		if
		:: primary.exists && mine && primary.count > 0 ->
			primary.count--;
			undue--
		:: else -> skip
		fi;
		me.spentIn = 0;
		me.step = script }

	/* The script decides. */
	:: atomic { me.step == script ->
		begin();
		if
		:: primary.count + 1 <= LIMIT -> primary.count++; learn(); admit()
		:: else -> learn(); refuse()
		fi }

	/* A message or its reply is lost: nobody knows whether it ran, and nothing is
	 * repeated or given back. */
	:: atomic { losses > 0 && me.step == plainReply ->
		losses--;
		if
		:: me.replyReset == 0 -> excused = true
		:: else -> skip
		fi;
		if
		:: mine -> kept++
		:: else -> skip
		fi;
		me.spentIn = 0; me.replyCount = 0; me.replyReset = 0;
#ifdef BREAK_REPEAT
		/* The request is admitted as if it had never been sent. */
		admit()
#else
		me.step = idle
#endif
		}
	:: atomic { losses > 0 && me.step == plain -> losses--; me.step = idle }

	:: atomic { crashes > 0 && me.step != idle ->
		crashes--;
		if
		:: mine -> kept++
		:: else -> skip
		fi;
		if
		:: me.step == adopt || me.step == plainReply -> excused = true
		:: else -> skip
		fi;
		me.spentIn = 0; me.replyCount = 0; me.replyReset = 0; me.count = 0; me.reset = 0;
		me.step = idle }

	:: atomic { me.todo == 0 && me.step == idle -> resting++; break }
	od
}

proctype World() {
	do
	:: atomic { ticks > 0 -> ticks--; now++ }
	:: atomic { vanishings > 0 && primary.exists ->
		vanishings--; excused = true; newWindow();
		primary.exists = false; primary.count = 0; primary.reset = 0 }
	:: atomic { failovers > 0 && (copy.exists != primary.exists || copy.count != primary.count || copy.reset != primary.reset) ->
		copy.exists = primary.exists; copy.count = primary.count; copy.reset = primary.reset }
	:: atomic { failovers > 0 ->
		failovers--; excused = true; newWindow();
		primary.exists = copy.exists; primary.count = copy.count; primary.reset = copy.reset }
	:: atomic { resting == PROCESSES ->
		/* Everything that was not admitted was given back, but for crashes and losses. */
		assert(excused || !isOpen(primary.reset) || primary.count == admitted + kept);
		/* No orphan stays. */
		assert(excused || !primary.exists || primary.reset != 0);
		break }
	od
}

init {
	atomic { run Caddy(0); run Caddy(1); run World() }
}
