// Sections of far_mz and t_hat, and where an element of one lies.

// far_mz [nh][MZ_SECTIONS][m]: far maximum mu; far mass at scale exp(-mu) in two levels; the shift that
// is taken from every folded key's logit, the same for all landmarks.
const MZ_MAX: u32 = 0u;
const MZ_TOTAL: u32 = 1u;
const MZ_RECENT: u32 = 2u;
const MZ_SHIFT: u32 = 3u;
const MZ_SECTIONS: u32 = 4u;

// t_hat [nh][T_SECTIONS][m][dv]: far numerator at scale exp(-mu) in the same two levels.
const T_TOTAL: u32 = 0u;
const T_RECENT: u32 = 1u;
const T_SECTIONS: u32 = 2u;

fn far_mz_at(section: u32, gh: u32, a: u32) -> u32 {
    return (gh * MZ_SECTIONS + section) * params.m + a;
}

// In vec4s, of which a row has dv / 4.
fn t_hat_at(section: u32, gh: u32, a: u32) -> u32 {
    return ((gh * T_SECTIONS + section) * params.m + a) * (params.dv / 4u);
}
