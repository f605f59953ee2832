package simredis

import (
	"cmp"
	"slices"
	"strings"
)

// sortedSet is in the order of scores and, of one score, of names.
type sortedSet struct {
	members []member
	scores  map[string]float64
}

type member struct {
	score float64
	name  string
}

func newSortedSet() *sortedSet { return &sortedSet{scores: map[string]float64{}} }

func (z *sortedSet) place(m member) int {
	i, _ := slices.BinarySearchFunc(z.members, m, func(a, b member) int {
		return cmp.Or(cmp.Compare(a.score, b.score), strings.Compare(a.name, b.name))
	})
	return i
}

// set reports whether the member is new, and whether it has changed.
func (z *sortedSet) set(name string, score float64) (added, changed bool) {
	before, known := z.scores[name]
	if known && before == score {
		return false, false
	}
	if known {
		i := z.place(member{before, name})
		z.members = slices.Delete(z.members, i, i+1)
	}
	z.scores[name] = score
	z.members = slices.Insert(z.members, z.place(member{score, name}), member{score, name})
	return !known, true
}

func (z *sortedSet) remove(name string) bool {
	score, known := z.scores[name]
	if known {
		i := z.place(member{score, name})
		z.removeRanks(i, i+1)
	}
	return known
}

func (z *sortedSet) removeRanks(from, to int) {
	for _, m := range z.members[from:to] {
		delete(z.scores, m.name)
	}
	z.members = slices.Delete(z.members, from, to)
}

// bound is the end of a range of scores.
type bound struct {
	score    float64
	excludes bool
}

func parseBound(text string) (b bound, err error) {
	text, b.excludes = strings.CutPrefix(text, "(")
	if b.score, err = parseFloat(text); err != nil {
		return b, Error("ERR min or max is not a float")
	}
	return b, nil
}

// between returns the ranks of the first member in a range of scores, and of the first one
// after it.
func (z *sortedSet) between(low, high bound) (from, to int) {
	if z == nil {
		return 0, 0
	}
	from = z.rank(low.score, low.excludes)
	return from, max(from, z.rank(high.score, !high.excludes))
}

// rank returns the number of members below a score, or up to it.
func (z *sortedSet) rank(score float64, inclusive bool) int {
	i, _ := slices.BinarySearchFunc(z.members, score, func(m member, score float64) int {
		if m.score < score || inclusive && m.score == score {
			return -1
		}
		return 1
	})
	return i
}

func (z *sortedSet) size() int {
	if z == nil {
		return 0
	}
	return len(z.members)
}

// ranks are the first and the last one of a range, of which those below 0 count from the end.
type ranks struct{ first, last int64 }

func parseRanks(first, last string) (r ranks, err error) {
	if r.first, err = parseInteger(first); err != nil {
		return r, err
	}
	r.last, err = parseInteger(last)
	return r, err
}

// of returns the first rank in the range, and the one after the last, of so many.
func (r ranks) of(size int) (from, to int) {
	n := int64(size)
	if r.first < 0 {
		r.first = max(r.first+n, 0)
	}
	if r.last < 0 {
		r.last += n
	}
	r.last = min(r.last, n-1)
	if r.first > r.last {
		return 0, 0
	}
	return int(r.first), int(r.last + 1)
}

func addMembers(s *Server, args []string) (any, error) {
	if len(args)%2 != 0 {
		return nil, errSyntax
	}
	var scores []float64
	for pair := range slices.Chunk(args[2:], 2) {
		score, err := parseFloat(pair[0])
		if err != nil {
			return nil, err
		}
		scores = append(scores, score)
	}
	z, err := get[*sortedSet](s, args[1])
	if err != nil {
		return nil, err
	}
	if z == nil {
		z = newSortedSet()
		s.put(args[1], z, 0)
	}
	number, changes := int64(0), false
	for i, score := range scores {
		added, changed := z.set(args[3+2*i], score)
		if added {
			number++
		}
		changes = changes || changed
	}
	if changes {
		s.changed(args...)
	}
	return number, nil
}

func removeMembers(s *Server, args []string) (any, error) {
	z, err := get[*sortedSet](s, args[1])
	if err != nil || z == nil {
		return int64(0), err
	}
	removed := int64(0)
	for _, name := range args[2:] {
		if z.remove(name) {
			removed++
		}
	}
	s.shrunk(z, removed, args)
	return removed, nil
}

func removeRanks(s *Server, args []string) (any, error) {
	r, err := parseRanks(args[2], args[3])
	if err != nil {
		return nil, err
	}
	z, err := get[*sortedSet](s, args[1])
	if err != nil {
		return nil, err
	}
	from, to := r.of(z.size())
	if from == to {
		return int64(0), nil
	}
	z.removeRanks(from, to)
	removed := int64(to - from)
	s.shrunk(z, removed, args)
	return removed, nil
}

// shrunk ends a command that has removed members. Without any the key is gone.
func (s *Server) shrunk(z *sortedSet, removed int64, args []string) {
	if z.size() == 0 {
		delete(s.keys, args[1])
	}
	if removed > 0 {
		s.changed(args...)
	}
}

func countMembers(s *Server, args []string) (any, error) {
	z, err := get[*sortedSet](s, args[1])
	return int64(z.size()), err
}

func countScores(s *Server, args []string) (any, error) {
	low, err := parseBound(args[2])
	if err != nil {
		return nil, err
	}
	high, err := parseBound(args[3])
	if err != nil {
		return nil, err
	}
	z, err := get[*sortedSet](s, args[1])
	from, to := z.between(low, high)
	return int64(to - from), err
}

func scoresOf(s *Server, args []string) (any, error) {
	z, err := get[*sortedSet](s, args[1])
	if err != nil {
		return nil, err
	}
	replies := make([]any, len(args)-2)
	for i, name := range args[2:] {
		if z == nil {
			continue
		}
		if score, known := z.scores[name]; known {
			replies[i] = formatFloat(score)
		}
	}
	return replies, nil
}

// span is what ZRANGE is asked for: ranks, or the scores from low to high.
type span struct {
	ranks
	low, high                 bound
	byScore, reversed, scores bool
	// Of scores only count members from offset on are wanted, all if count is less than 0.
	offset, count int64
}

func parseSpan(args []string) (r span, err error) {
	r.count = -1
	for i := 4; i < len(args); i++ {
		switch strings.ToUpper(args[i]) {
		case "BYSCORE":
			r.byScore = true
		case "REV":
			r.reversed = true
		case "WITHSCORES":
			r.scores = true
		case "LIMIT":
			if i+2 >= len(args) {
				return r, errSyntax
			}
			if r.offset, err = parseInteger(args[i+1]); err != nil {
				return r, err
			}
			if r.count, err = parseInteger(args[i+2]); err != nil {
				return r, err
			}
			i += 2
		default:
			return r, errSyntax
		}
	}
	return r, r.parseEnds(args[2], args[3])
}

// parseEnds parses the ends, of which a reversed range of scores names the highest first.
func (r *span) parseEnds(first, last string) (err error) {
	if !r.byScore {
		if r.offset = 0; r.count != -1 {
			return Error("ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX")
		}
		r.ranks, err = parseRanks(first, last)
		return err
	}
	if r.reversed {
		first, last = last, first
	}
	if r.low, err = parseBound(first); err != nil {
		return err
	}
	r.high, err = parseBound(last)
	return err
}

// of returns the members of z that are in r, in its order.
func (r *span) of(z *sortedSet) []member {
	from, to := r.places(z)
	if from == to {
		return nil
	}
	members := z.members[from:to]
	if r.reversed {
		members = slices.Clone(members)
		slices.Reverse(members)
	}
	if r.offset < 0 || r.offset > int64(len(members)) {
		return nil
	}
	members = members[r.offset:]
	if r.count >= 0 {
		members = members[:min(r.count, int64(len(members)))]
	}
	return members
}

func (r *span) places(z *sortedSet) (from, to int) {
	if r.byScore {
		return z.between(r.low, r.high)
	}
	from, to = r.ranks.of(z.size())
	if r.reversed && from != to {
		from, to = z.size()-to, z.size()-from
	}
	return from, to
}

func rangeMembers(s *Server, args []string) (any, error) {
	r, err := parseSpan(args)
	if err != nil {
		return nil, err
	}
	z, err := get[*sortedSet](s, args[1])
	if err != nil {
		return nil, err
	}
	members := r.of(z)
	replies := make([]any, 0, 2*len(members))
	for _, m := range members {
		if replies = append(replies, m.name); r.scores {
			replies = append(replies, formatFloat(m.score))
		}
	}
	return replies, nil
}
