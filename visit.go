package shardlimit

// visit is a part's stay in one of the stores in which its handler counts. It
// lasts until the request has settled and its leases have ended.
type visit struct {
	use *storeUse
	// open is nil where the store could not be opened, because of err.
	open *openedStore
	err  error
}

// enter opens the stores. Where that fails, it fails the zones that count there.
func (p *part) enter() {
	for _, z := range p.zones {
		if v := &p.visits[z.in]; v.use == nil {
			v.use = z.use
			v.open, v.err = z.use.enter()
		}
	}
}

// release lets go of the stores.
func (p *part) release() {
	for in := range p.visits {
		if v := &p.visits[in]; v.open != nil {
			v.open = nil
			v.use.leave()
		}
	}
}

// open is the store in which zone i counts, or nil if it could not be opened.
func (p *part) open(i int) *openedStore { return p.visits[p.zones[i].in].open }

// onlyOpen is the store in which all zones count, or nil if there are two or it
// could not be opened.
func (p *part) onlyOpen() *openedStore {
	if p.split {
		return nil
	}
	return p.open(0)
}

// byStore parts some zones by the store in which they count.
func (p *part) byStore(some []int) (in [mostStores][]int) {
	if !p.split {
		in[p.zones[0].in] = some
		return in
	}
	for _, i := range some {
		in[p.zones[i].in] = append(in[p.zones[i].in], i)
	}
	return in
}
