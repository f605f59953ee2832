package libraries

import (
	"github.com/shardlimit/caddy-shardlimit/bench/goal"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// ceilingBound is the part of the ceiling that a Take is to reach.
const ceilingBound = 0.75

// Goals returns what was to be reached with the goroutines that were measured:
// first that by which a Take is judged, then the same for other scenes and
// algorithms.
func (r *Result) Goals() []goal.Goal {
	var first, extra []goal.Goal
	for _, c := range r.shared {
		for i, l := range c.limiters {
			bound, ok := l.kind.bounds[c.scene.goroutines]
			switch {
			case !ok, (l.kind == checkAndCharge || l.kind == checkAndDetach) && c.scene.refused:
				// What is refused is not charged.
			case l.kind.extra || c.scene.refused:
				extra = append(extra, newGoal(l.kind.name+", "+c.scene.crowd()+" ÷ fastest peer", bound, c.ratios(i)))
			default:
				first = append(first, newGoal(l.kind.name+", "+c.scene.crowd()+" ÷ fastest peer", bound, c.ratios(i)))
			}
		}
		if c.ceiling != nil && c.scene.goroutines == ceilingWith {
			first = append(first, newGoal(takeFixedWindow.name+", "+c.scene.crowd()+" ÷ pipelined redis-benchmark",
				ceilingBound, c.parts(c.place(takeFixedWindow))))
		}
	}
	return append(first, extra...)
}

func newGoal(what string, atLeast float64, s spread.Spread) goal.Goal {
	return goal.Goal{What: what, AtLeast: true, Bound: atLeast, Spread: s}
}
