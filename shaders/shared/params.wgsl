// Parameters of every stage kernel. A stage runs over one sub-chunk: rows r0 .. r0 + k of a call.
// Widths are in floats; planes of vec4s hold width / 4 of them a row.

//#include shared/layout.wgsl

struct Params {
    hpg: u32,      // query heads a group
    m: u32,        // landmarks, capacity
    w: u32,        // ring capacity, rows
    ns: u32,       // sinks, rows
    d: u32,        // key width, floats
    dv: u32,       // value width, floats
    nh: u32,       // query heads of all groups
    ng: u32,       // groups
    k: u32,        // rows of this sub-chunk
    r0: u32,       // its first row within the call
    kcap: u32,     // row stride of far_rows and evict_weights
    pieces: u32,   // pieces of the value sum
    rect: u32,     // 0 aggregate, 1 fm
    scale: f32,    // factor of every logit
    panel: u32,    // columns of a panel
    splits: u32,   // splits of the keys
}

@group(0) @binding(0) var<uniform> params: Params;
