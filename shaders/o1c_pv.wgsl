// Near value sums of all rows, weights times values, a split of the columns each.
//
//   panel_scores [nh][kcap][panel] vec4         near weights, zero where a row does not look
//   panel_v      [G][panel][dv] vec4            values, one for each column
//   near_parts   [splits][nh][kcap][dv] vec4    sums of k rows of each head; a split without columns
//                                               gets zeros
//
// One workgroup a tile of 64 x 64 of a group's product over a split, see shared/tile.wgsl; a group's
// rows are those of all its heads. Splits are equal runs of whole steps.

//#include shared/params.wgsl
//#include shared/tile_f32.wgsl
//#include shared/tile.wgsl
//#include shared/pv.wgsl
