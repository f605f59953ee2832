package algorithm_test

// admissions are what was taken, in the order in which it was.
type admissions []struct{ at, cost int64 }

func (a *admissions) add(at, cost int64) { *a = append(*a, struct{ at, cost int64 }{at, cost}) }

// most is the most that was taken in any interval of that length, of which one
// end does not belong to it. Time must not have run backwards.
func (a admissions) most(length int64) int64 {
	most, sum, first := int64(0), int64(0), 0
	for _, last := range a {
		sum += last.cost
		for a[first].at <= last.at-length {
			sum -= a[first].cost
			first++
		}
		most = max(most, sum)
	}
	return most
}

// since is what was taken after an instant.
func (a admissions) since(at int64) (sum int64) {
	for _, m := range a {
		if m.at > at {
			sum += m.cost
		}
	}
	return sum
}
