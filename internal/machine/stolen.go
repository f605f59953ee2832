package machine

import (
	"os"
	"strconv"
	"strings"
)

// Times is what the processors have done since they started, in an unknown unit.
type Times struct{ all, stolen int64 }

// Now reads them. Where the system does not tell, they are zero.
func Now() Times {
	b, _ := os.ReadFile("/proc/stat")
	return parse(string(b))
}

// placeOfStolen is among the times of the line of all processors: user, nice,
// system, idle, iowait, irq, softirq, steal. What comes after them is in user.
const placeOfStolen = 7

func parse(stat string) (t Times) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) <= placeOfStolen+1 || fields[0] != "cpu" {
		return t
	}
	for i, field := range fields[1 : placeOfStolen+2] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return Times{}
		}
		if t.all += n; i == placeOfStolen {
			t.stolen = n
		}
	}
	return t
}

// StolenSince is the part of the processors' time since then that the host of a
// virtual machine gave to others.
func (t Times) StolenSince(before Times) float64 {
	all := t.all - before.all
	if all <= 0 {
		return 0
	}
	return float64(t.stolen-before.stolen) / float64(all)
}
