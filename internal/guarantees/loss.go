package main

import "fmt"

// loss is what a fault did to what a client was charged.
type loss struct {
	fault string
	limit limit
	// served is how many requests were, refused how many the limit refused, and
	// unanswered how many on_error denied because it is not known whether what
	// they took counts.
	served, refused, unanswered int64
	// counted is what Redis holds.
	counted int64
	// uncertain is how many charges and refunds Caddy does not know the outcome
	// of, untold how many takes; notRefunded is how many refunds were given up,
	// with those that are uncertain.
	uncertain, untold, notRefunded int64
}

// double is how much more was counted than was served, lost how much less.
func (l *loss) double() int64 { return max(l.counted-l.served, 0) }

func (l *loss) lost() int64 { return max(l.served-l.counted, 0) }

// mayBeDouble is how much more may be counted than was served: with charge after
// nothing, for nothing is sent twice; with charge before what was taken for
// requests that were denied because the reply did not come. A sliding log gives
// that back by its name, unless that fails as well.
func (l *loss) mayBeDouble() int64 {
	switch {
	case l.limit.charge == after:
		return 0
	case l.limit.algorithm == slidingLog:
		return l.notRefunded
	default:
		return min(l.untold, l.unanswered)
	}
}

// mayBeLost is how much less may be counted: with charge after the charges whose
// reply did not come, each of which may have met the fault on its way; with
// charge before nothing, for what is served was taken.
func (l *loss) mayBeLost() int64 {
	if l.limit.charge == after {
		return l.uncertain
	}
	return 0
}

// untouched is the breach of a client that the fault did not meet.
const untouched = "no reply was lost, so the fault did not happen"

// breaches are the bounds that were exceeded.
func (l *loss) breaches() (all []string) {
	tell := func(format string, args ...any) {
		all = append(all, fmt.Sprintf("%s, %s: ", l.fault, l.limit)+fmt.Sprintf(format, args...))
	}
	if n, most := l.double(), l.mayBeDouble(); n > most {
		tell("%d counted beyond what was served, at most %d may be", n, most)
	}
	if n, most := l.lost(), l.mayBeLost(); n > most {
		tell("%d served and not counted, at most %d may be", n, most)
	}
	if l.uncertain+l.untold == 0 {
		tell(untouched)
	}
	if l.refused > 0 {
		tell("%d requests were refused, though the limit is far", l.refused)
	}
	return all
}

func (l *loss) String() string {
	return fmt.Sprintf("%s, %s: %d served, %d unanswered, %d counted, %d uncertain, %d untold; %d of %d double, %d of %d lost",
		l.fault, l.limit, l.served, l.unanswered, l.counted, l.uncertain, l.untold, l.double(), l.mayBeDouble(), l.lost(), l.mayBeLost())
}
