// Near logits of all rows over all columns: scale times queries times keys transposed,
// operands rounded to float16, sums in float32.
//
//   panel_q      [nh][kcap][d] vec4        queries, a head's rows together; k rows of each head read
//   panel_k      [G][panel][d] vec4        keys, one for each column
//   panel_scores [nh][kcap][panel] vec4    logits of k rows of each head over all columns
//
// One workgroup a tile of 64 x 64 of a group's product, see shared/tile.wgsl; a group's rows are those
// of all its heads.

enable f16;

//#include shared/params.wgsl
//#include shared/tile_f16.wgsl
//#include shared/tile.wgsl
//#include shared/qk.wgsl
