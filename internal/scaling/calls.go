package main

// kind is one of the ways to call Redis.
type kind uint8

const (
	// check asks a replica.
	check kind = iota
	// open asks the primary, which opens a window where none is.
	open
	charge
	take
	refund
	kinds
)

var kindNames = [kinds]string{"check", "open", "charge", "take", "refund"}

// calls is what requests cost Redis.
type calls struct {
	requests, admitted float64
	// waited is how many requests were decided by an answer that they waited for.
	waited float64
	// made are the calls.
	made [kinds]float64
}

func (c *calls) add(o calls, times float64) {
	c.requests += times * o.requests
	c.admitted += times * o.admitted
	c.waited += times * o.waited
	for k := range o.made {
		c.made[k] += times * o.made[k]
	}
}

// perRequest is what one request costs.
func (c calls) perRequest() (one calls) {
	if c.requests > 0 {
		one.add(c, 1/c.requests)
	}
	return one
}

func (c calls) sum() (sum float64) {
	for _, n := range c.made {
		sum += n
	}
	return sum
}

// primary is how many go to the primary: all but checks.
func (c calls) primary() float64 { return c.sum() - c.made[check] }
